"""Visits of blocks in pieces: each micro-batch's pass through a block is parked from one visit to the next."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.data.documents import Documents
from fuyou.layout.pieces import PiecePart
from fuyou.layout.record import Record
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.handles import PieceHandles
from fuyou.pieces.run import PieceRun
from fuyou.schedule.tasks import ComputeTask

OnGradient = Callable[[PiecePart, torch.Tensor], None]


@dataclass
class _Pass:
    """One micro-batch's pass through a block."""

    run: PieceRun[Any]
    handles: PieceHandles
    documents: Documents | None


class PieceVisits:
    """The passes that are under way.

    Args:
        stack: the model.
        records: all records of the model.
        blocks: indices of each block's records.
    """

    def __init__(self, stack: StreamedModel, records: Sequence[Record], blocks: Sequence[Sequence[int]]):
        self._stack, self._records, self._blocks = stack, records, blocks
        self._passes: dict[int, _Pass] = {}  # by micro-batch

    def begin(
        self,
        task: ComputeTask,
        work: Callable[[], Any],
        documents: Documents | None,
        random_states: tuple[torch.Tensor, ...],
        on_gradient: OnGradient | None = None,
    ) -> None:
        """Prepare the pass that begins with ``task``.

        Args:
            task: of the first part.
            work: the pass, with the block's own modules; what it returns is what :meth:`end` returns.
            documents: documents that share the rows.
            random_states: states that the generators have when it begins.
            on_gradient: called with gradients of what is trained of the pieces; None: this is a forward pass.
        """
        layer = task.visit.layer
        assert layer is not None
        records = [self._records[index] for index in self._blocks[layer]]
        pieces = [tuple(slot.part for slot in record.parameters) for record in records]
        slots = ((slot, record.trained_names) for record in records for slot in record.parameters)
        trained = {slot.names[0] for slot, names in slots if slot.name in names}
        handles = PieceHandles(
            self._stack, layer, pieces, trained if on_gradient is not None else (), on_gradient or _no_gradient
        )
        with self._stack.apart(documents):
            run = PieceRun(work, self._stack.device, random_states)
        self._passes[task.micro] = _Pass(run, handles, documents)

    def advance(self, task: ComputeTask, views: Mapping[str, torch.Tensor], beside: Mapping[str, torch.Tensor]) -> None:
        """Let the pass go on while it needs the piece of ``task``.

        Args:
            task: of the part.
            views: the piece's parameters on the device, by name.
            beside: adapters of the block, which are there for all parts.
        """
        layer, one = task.visit.layer, self._passes[task.micro]
        assert layer is not None
        weights = {slot.part: views[slot.name] for slot in self._records[task.visit.record].parameters}
        piece = self._blocks[layer].index(task.visit.record)
        with self._stack.apart(one.documents), one.handles.bound(), self._stack.bound(beside):
            one.run.advance(piece, weights)

    def end(self, micro: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Return what the pass of a micro-batch has returned, and the states in which it leaves the generators."""
        one = self._passes.pop(micro)
        states = one.run.random_state
        assert states is not None
        return one.run.result(), states

    def close(self) -> None:
        """Abandon all passes."""
        while self._passes:
            self._passes.popitem()[1].run.close()


def _no_gradient(part: PiecePart, gradient: torch.Tensor) -> None:
    raise AssertionError(f"a forward pass has made a gradient of {part}")
