"""Visits of blocks in pieces: each micro-batch's pass through a block is parked from one visit to the next."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common.data.documents import Documents
from common.randomness import random_states, set_random_states
from fuyou.layout.model_layout import ModelLayout, Phase
from fuyou.layout.record_parts import PiecePart
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.handles import PieceHandles
from fuyou.pieces.run import PieceRun
from fuyou.schedule.tasks import ComputeTask, known


@contextmanager
def replayed(states: tuple[torch.Tensor, ...], device: torch.device) -> Iterator[Callable[[], None]]:
    """Draw the random numbers that follow ``states`` again, and leave the caller's generators as they were.

    Yields:
        What begins them once more.
    """
    outer = random_states(device)
    rewind = partial(set_random_states, states, device)
    rewind()
    try:
        yield rewind
    finally:
        set_random_states(outer, device)


AddGradient = Callable[[int, str, torch.Tensor], None]  # Takes record index, parameter name, and gradient


@dataclass
class _Pass:
    run: PieceRun[Any]
    handles: PieceHandles
    documents: Documents | None


class PieceVisits:
    """The running passes.

    Args:
        add_gradient: called with gradients of what is trained of the pieces, in a backward pass.
    """

    def __init__(self, stack: StreamedModel, layout: ModelLayout, add_gradient: AddGradient):
        self._stack = stack
        self._records = layout.records
        self._blocks = layout.blocks
        self._add_gradient = add_gradient
        self._passes: dict[int, _Pass] = {}  # by micro-batch
        # Those that all its micro-batches share
        self._handles: tuple[tuple[int, Phase], PieceHandles] | None = None

    def begin(
        self,
        task: ComputeTask,
        work: Callable[[], Any],
        documents: Documents | None,
        states: tuple[torch.Tensor, ...],
    ) -> None:
        """Prepare the pass that begins with ``task``.

        Args:
            work: the pass, with the block's own modules; what it returns is what :meth:`end` returns.
            documents: documents that share the rows.
            states: those that the generators have when it begins.
        """
        with self._stack.apart(documents):
            run = PieceRun(work, self._stack.device, states)
        self._passes[task.micro] = _Pass(
            run, self._handles_of(known(task.visit.layer), task.visit.phase), documents
        )

    def _handles_of(self, layer: int, phase: Phase) -> PieceHandles:
        """Return the handles of a block's parameters in a pass, made once for all of its micro-batches."""
        if self._handles is None or self._handles[0] != (layer, phase):
            records = [self._records[index] for index in self._blocks[layer]]
            places = {slot.part: (record, slot) for record in records for slot in record.parameters}
            trained = {slot.names[0] for record, slot in places.values() if slot.name in record.trained_names}

            def on_gradient(part: PiecePart, gradient: torch.Tensor) -> None:
                record, slot = places[part]
                self._add_gradient(record.index, slot.name, gradient)

            pieces = [tuple(slot.part for slot in record.parameters) for record in records]
            names = trained if phase is Phase.BLOCK_BACKWARD else ()
            self._handles = (layer, phase), PieceHandles(self._stack, layer, pieces, names, on_gradient)
        return self._handles[1]

    def advance(
        self, task: ComputeTask, views: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]
    ) -> None:
        """Let the pass continue while it needs the piece of ``task``.

        Args:
            views: the piece's parameters on the device, by name.
            adapters: those of the block, which are there for all parts.
        """
        current = self._passes[task.micro]
        weights = {slot.part: views[slot.name] for slot in self._records[task.visit.record].parameters}
        piece = self._blocks[known(task.visit.layer)].index(task.visit.record)
        with self._stack.apart(current.documents), current.handles.bound(), self._stack.bound(adapters):
            current.run.advance(piece, weights)

    def end(self, micro: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Return what the pass of a micro-batch has returned, and the states in which it leaves the generators."""
        current = self._passes.pop(micro)
        states = current.run.random_state
        assert states is not None
        return current.run.result(), states

    def close(self) -> None:
        while self._passes:
            self._passes.popitem()[1].run.close()
