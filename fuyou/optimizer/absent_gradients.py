"""Parameters without a gradient in a step, such as experts that no token was routed to.

As in ``torch.optim.AdamW`` where ``grad is None``, weights and moments stay unchanged, nothing decays, and the step
count used for bias correction does not advance.

The absence is encoded in the gradient: its first element is -0.0, which a present gradient never has there. So the mark
follows the gradient to the drives and back, and the sum over all ranks has -0.0 there only if no rank had a gradient.
Ranks read only their part, so the first element of each rank's part is marked.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from fuyou.layout.record import Record
from fuyou.layout.record_parts import Chunk
from fuyou.optimizer.adam import UpdateRange


class AbsenceMarks:
    """Marks in the gradient of a record which parameters have none.

    Args:
        device: of the gradient. A tensor of all first elements stays there: to copy one would make the host wait.
    """

    def __init__(self, record: Record, device: torch.device):
        self._starts = record.part_starts
        firsts = [start for starts in self._starts.values() for start in starts]
        self._firsts = torch.tensor(firsts, dtype=torch.int64, device=device)

    def mark(self, flat: torch.Tensor, present: Collection[str]) -> None:
        """Mark a complete gradient.

        Args:
            flat: ``[numel]`` in the dtype in which it goes to the optimizer; zero where there is no gradient.
            present: first names of the parameters that have a gradient.
        """
        flat[self._firsts] += 0.0  # makes 0.0 of -0.0, and changes nothing else
        for name, starts in self._starts.items():
            for start in starts if name not in present else ():
                flat[start : start + 1].fill_(-0.0)


def marked_absent(firsts: torch.Tensor) -> torch.Tensor:
    """Return, for the first elements of gradients, whether each marks an absent gradient."""
    return (firsts == 0) & torch.signbit(firsts)


class OwnedParameters:
    """Parameters in the part of a record that this rank updates."""

    def __init__(self, record: Record):
        first = record.share.owned_start(record.numel)
        owned = record.owned
        slots = sorted(range(len(record.parameters)), key=lambda index: record.parameters[index].offset)
        ends = [record.parameters[index].offset for index in slots[1:]] + [record.numel]
        # Indices of parameters, and the elements [start, stop) of this rank that hold them and the padding behind them.
        self._parts: list[tuple[int, int, int]] = []
        marked: list[tuple[int, int]] = []
        for index, end in zip(slots, ends, strict=True):
            slot = record.parameters[index]
            start = max(slot.offset - first, 0)
            stop = min(end - first, owned)
            if start < stop:
                self._parts.append((index, start, stop))
                if first + start < slot.offset + slot.numel:  # else it is nothing but padding
                    marked.append((index, start))
        self._marked = [index for index, _ in marked]
        self._firsts = torch.tensor([start for _, start in marked], dtype=torch.int64)

    def absent(self, gradient: torch.Tensor) -> tuple[int, ...]:
        """Return the indices of the parameters marked absent in a gradient ``[owned]``."""
        without = marked_absent(gradient[self._firsts])
        return tuple(index for index, none in zip(self._marked, without.tolist(), strict=True) if none)

    def runs(self, chunk: Chunk, absent: Collection[int], missed: Mapping[int, int]) -> list[UpdateRange]:
        """Return the ranges of a chunk to update, counted from its start.

        Args:
            absent: indices of the parameters without a gradient.
            missed: number of earlier steps without a gradient, by index; 0 if not listed.
        """
        runs: list[UpdateRange] = []
        for index, first, end in self._parts:
            start = max(first, chunk.start) - chunk.start
            stop = min(end, chunk.stop) - chunk.start
            if start >= stop or index in absent:
                continue
            count = missed.get(index, 0)
            if runs and (runs[-1].stop, runs[-1].missed) == (start, count):
                start = runs.pop().start
            runs.append(UpdateRange(start, stop, count))
        return runs


class MissedUpdates:
    """Counts the steps in which each parameter had no gradient, starting from ``counts`` by first name."""

    def __init__(self, records: Sequence[Record], counts: Mapping[str, int]):
        self._records = records
        # For each record, the step of its newest update, and counts by the parameter's index before and after it.
        self._newest: dict[int, tuple[int, dict[int, int], dict[int, int]]] = {}
        for record in records:
            missed = {index: counts.get(slot.name, 0) for index, slot in enumerate(record.parameters)}
            self._newest[record.index] = 0, {}, {index: count for index, count in missed.items() if count}

    def before(self, record: int, step: int) -> dict[int, int]:
        """Return the counts before the update of a record by ``step``; the same if the update is repeated."""
        newest, before, after = self._newest[record]
        if newest != step:
            before = after
            self._newest[record] = step, before, after
        return before

    def updated(self, record: int, absent: Collection[int]) -> None:
        """Count the parameters without a gradient in the update that :meth:`before` was called for last."""
        step, before, _ = self._newest[record]
        self._newest[record] = step, before, before | {index: before.get(index, 0) + 1 for index in absent}

    def counts(self) -> dict[str, int]:
        """Return all counts above 0, by first name."""
        return {
            self._records[record].parameters[index].name: count
            for record, (_, _, counts) in self._newest.items()
            for index, count in sorted(counts.items())
        }
