"""Parameters without a gradient in a step, such as experts that no token was routed to: AdamW leaves them alone.

As in ``torch.optim.AdamW`` where ``grad is None``, weights and moments stay as they are, nothing decays, and the number
of updates that bias correction goes by does not advance.

The absence is written into the gradient itself: its first element is -0.0, which a gradient that is there never has in
that place. So the mark goes wherever the gradient goes, to the drives and back, and the sum over all ranks has -0.0
there exactly if no rank had a gradient. Ranks read their own part only, so the first element of each rank's part is
marked.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from fuyou.layout.record import Record
from fuyou.layout.record_parts import Chunk, ParameterSlot
from fuyou.optimizer.adam import UpdateRange


def mark_absent(record: Record, flat: torch.Tensor, present: Collection[str]) -> None:
    """Mark in a complete gradient which parameters have none.

    Args:
        record: the record that it is the gradient of.
        flat: ``[numel]`` in the dtype in which it goes to the optimizer; zero where there is no gradient.
        present: first names of the parameters that have one.
    """
    present_firsts: list[torch.Tensor] = []
    for slot in record.parameters:
        firsts = [flat[start : start + 1] for start in _part_starts(record, slot)]
        if slot.name in present:
            present_firsts += firsts
        else:
            for first in firsts:
                first.fill_(-0.0)
    if present_firsts:
        torch._foreach_add_(present_firsts, 0.0)  # makes 0.0 of -0.0, and changes nothing else


def marked_absent(firsts: torch.Tensor) -> torch.Tensor:
    """Return, for the first elements of some parameters' gradients, whether each is the mark of an absent one: bool."""
    return (firsts == 0) & torch.signbit(firsts)


def _part_starts(record: Record, slot: ParameterSlot) -> list[int]:
    stop = slot.offset + slot.numel
    following = (slot.offset // record.owned + 1) * record.owned
    return [*range(slot.offset, min(slot.offset + 1, stop)), *range(following, stop, record.owned)]


@dataclass(frozen=True)
class _Part:
    """The part of a parameter, padding behind it included, that this rank updates: ``[start, stop)``."""

    slot: int  # Index of the parameter in its record
    start: int  # First element, counted from the first one that this rank owns; `stop` likewise
    stop: int


class OwnedParameters:
    """The parameters in the part of a record that this rank updates.

    Args:
        record: the record, as this rank shares it.
    """

    def __init__(self, record: Record):
        first, owned = record.share.owned_start(record.numel), record.owned
        slots = sorted(range(len(record.parameters)), key=lambda index: record.parameters[index].offset)
        ends = [record.parameters[index].offset for index in slots[1:]] + [record.numel]
        self._parts: list[_Part] = []
        self._marked: list[_Part] = []
        for index, end in zip(slots, ends, strict=True):
            slot = record.parameters[index]
            part = _Part(index, max(slot.offset - first, 0), min(end - first, owned))
            if part.start < part.stop:
                self._parts.append(part)
                if first + part.start < slot.offset + slot.numel:  # else it is nothing but padding
                    self._marked.append(part)
        self._firsts = torch.tensor([part.start for part in self._marked], dtype=torch.int64)

    def absent(self, gradient: torch.Tensor) -> tuple[int, ...]:
        """Return the indices of the parameters that are marked absent in a gradient, ``[owned]``."""
        without = marked_absent(gradient[self._firsts])
        return tuple(part.slot for part, none in zip(self._marked, without.tolist(), strict=True) if none)

    def runs(self, chunk: Chunk, absent: Collection[int], missed: Mapping[int, int]) -> list[UpdateRange]:
        """Return the ranges of a chunk that are to be updated, counted from its start.

        Args:
            chunk: a chunk of what this rank owns.
            absent: indices of the parameters that have no gradient.
            missed: number of earlier steps in which a parameter had none, by index; 0 for those that are not listed.
        """
        runs: list[UpdateRange] = []
        for part in self._parts:
            start, stop = max(part.start, chunk.start) - chunk.start, min(part.stop, chunk.stop) - chunk.start
            if start >= stop or part.slot in absent:
                continue
            count = missed.get(part.slot, 0)
            if runs and (runs[-1].stop, runs[-1].missed) == (start, count):
                start = runs.pop().start
            runs.append(UpdateRange(start, stop, count))
        return runs


class MissedUpdates:
    """Counts the steps in which each parameter had no gradient, for those that this rank updates a part of.

    Args:
        records: all records of the model.
        counts: by first name, as :meth:`counts` has returned them; those that are 0 may be missing.
    """

    def __init__(self, records: Sequence[Record], counts: Mapping[str, int]):
        self._records = records
        self._after: dict[int, dict[int, int]] = {}
        """For each record, counts by the parameter's index, after the record's newest update."""
        self._before: dict[int, dict[int, int]] = {}
        self._newest: dict[int, int] = {}
        """Step of each record's newest update."""
        for record in records:
            found = {index: counts.get(slot.name, 0) for index, slot in enumerate(record.parameters)}
            self._after[record.index] = {index: count for index, count in found.items() if count}

    def before(self, record: int, step: int) -> dict[int, int]:
        """Return the counts before the update of a record by ``step``, which comes next.

        An update that is done a second time starts from the counts that the first one started from.
        """
        if self._newest.get(record) != step:
            self._before[record] = self._after[record]
            self._newest[record] = step
        return self._before[record]

    def updated(self, record: int, absent: Collection[int]) -> None:
        """Note which parameters had no gradient in the update that :meth:`before` was called for last."""
        counts = dict(self._before[record])
        for index in absent:
            counts[index] = counts.get(index, 0) + 1
        self._after[record] = counts

    def counts(self) -> dict[str, int]:
        """Return all counts above 0, by the parameters' first names."""
        return {
            self._records[record].parameters[index].name: count
            for record, counts in self._after.items()
            for index, count in sorted(counts.items())
        }
