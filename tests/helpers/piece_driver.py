"""Plays the engine for a block in pieces: one piece on the device at a time, everything else overwritten."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from fuyou.layout.pieces import Piece, PieceOrder, PiecePart
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.division import divide
from fuyou.pieces.handles import PieceHandles
from fuyou.pieces.order import find_order
from fuyou.pieces.run import PieceRun


class PieceDriver:
    """Holds a block's weights, and brings piece after piece into one arena.

    Args:
        stack: the model.
        layer: index of the block.
        weights: real parameters by name: those that are cut.
        limit: bytes of a piece.
    """

    def __init__(self, stack: StreamedModel, layer: int, weights: Mapping[str, torch.Tensor], limit: int):
        self.weights = dict(weights)
        self.pieces = divide(stack, layer, limit, list(weights), lambda name: weights[name].nbytes)
        self.order: PieceOrder = find_order(stack, layer, self.pieces)
        self.trained = {name for name in weights if stack.model.get_parameter(name).requires_grad}
        self.gradients: dict[PiecePart, torch.Tensor] = {}
        self.arrived: dict[PiecePart, int] = {}
        self.handles = PieceHandles(stack, layer, self.pieces, self.trained, self._take)
        self.uploads: list[int] = []
        self._on_device = -1
        dtypes = {value.dtype for value in weights.values()}
        self._arenas = {
            dtype: torch.full([max(self._numel(piece, dtype) for piece in self.pieces)], torch.nan, dtype=dtype)
            for dtype in dtypes
        }

    def _value(self, part: PiecePart) -> torch.Tensor:
        value = self.weights[part.name]
        return value if part.experts is None else value[slice(*part.experts)]

    def _numel(self, piece: Piece, dtype: torch.dtype) -> int:
        return sum(self._value(part).numel() for part in piece if self._value(part).dtype == dtype)

    def upload(self, piece: int) -> dict[PiecePart, torch.Tensor]:
        """Overwrite what is in the arena, and copy a piece there."""
        self._on_device = piece
        self.uploads.append(piece)
        starts = dict.fromkeys(self._arenas, 0)
        for arena in self._arenas.values():
            arena.fill_(torch.nan)
        views = {}
        for part in self.pieces[piece]:
            value = self._value(part)
            start = starts[value.dtype]
            views[part] = self._arenas[value.dtype][start : start + value.numel()].view(value.shape)
            views[part].copy_(value)
            starts[value.dtype] += value.numel()
        return views

    def evict(self) -> None:
        for arena in self._arenas.values():
            arena.fill_(torch.nan)

    def _take(self, part: PiecePart, gradient: torch.Tensor) -> None:
        assert part in self.pieces[self._on_device]
        assert gradient.shape == self._value(part).shape and gradient.dtype == self._value(part).dtype
        self.arrived[part] = self.arrived.get(part, 0) + 1
        if part in self.gradients:
            self.gradients[part] = self.gradients[part] + gradient
        else:
            self.gradients[part] = gradient.clone()

    def run(self, sequence: Sequence[int], runs: Sequence[PieceRun]) -> None:
        """Bring the pieces of ``sequence`` one after another; every pass goes on with each."""
        for piece in sequence:
            weights = self.upload(piece)
            for run in runs:
                run.advance(piece, weights)
            del weights
        self.evict()
        assert all(run.ended for run in runs)

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter, put together from their parts."""
        found: dict[str, list[tuple[tuple[int, int], torch.Tensor]]] = {}
        for part, gradient in self.gradients.items():
            found.setdefault(part.name, []).append((part.experts or (0, 0), gradient))
        return {
            name: torch.cat([gradient for _, gradient in sorted(parts, key=lambda one: one[0])])
            for name, parts in found.items()
        }
