"""Plays the engine for a block in pieces: one piece on the device at a time, everything else overwritten."""

from collections.abc import Mapping, Sequence

import torch

from fuyou.layout.record_parts import Piece, PieceOrder, PiecePart
from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.division import divide, find_order
from fuyou.pieces.handles import PieceHandles
from fuyou.pieces.run import PieceRun


class PieceDriver:
    """Holds a block's weights, and brings piece after piece into one arena.

    Args:
        stack: the model.
        layer: index of the block.
        weights: real parameters by first name: those that are cut.
        count: how many pieces there are to be, about.
    """

    def __init__(self, stack: StreamedModel, layer: int, weights: Mapping[str, torch.Tensor], count: int = 6):
        self.stack, self.layer, self.weights = stack, layer, dict(weights)
        limit = sum(value.nbytes for value in weights.values()) // count
        self.pieces = divide(stack, layer, limit, list(weights), lambda name: weights[name].nbytes)
        self.order: PieceOrder = find_order(stack, layer, self.pieces)
        trained = {name for name in weights if stack.model.get_parameter(name).requires_grad}
        self.gradients: dict[PiecePart, torch.Tensor] = {}
        self.arrived: list[PiecePart] = []
        self.handles = PieceHandles(stack, layer, self.pieces, trained, self._take)
        self.uploads: list[int] = []
        self._on_device = -1
        dtypes = {value.dtype for value in weights.values()}
        self._arenas = {
            dtype: torch.full(
                [max(self._numel(piece, dtype) for piece in self.pieces)], torch.nan, dtype=dtype
            )
            for dtype in dtypes
        }

    def value(self, part: PiecePart) -> torch.Tensor:
        value = self.weights[part.name]
        return value if part.experts is None else value[slice(*part.experts)]

    def _numel(self, piece: Piece, dtype: torch.dtype) -> int:
        return sum(self.value(part).numel() for part in piece if self.value(part).dtype == dtype)

    def evict(self) -> None:
        self._on_device = -1
        for arena in self._arenas.values():
            arena.fill_(torch.nan)

    def upload(self, piece: int) -> dict[PiecePart, torch.Tensor]:
        """Overwrite what is in the arena, and copy a piece there."""
        self.evict()
        self._on_device = piece
        self.uploads.append(piece)
        starts = dict.fromkeys(self._arenas, 0)
        views = {}
        for part in self.pieces[piece]:
            value = self.value(part)
            start = starts[value.dtype]
            views[part] = self._arenas[value.dtype][start : start + value.numel()].view(value.shape)
            views[part].copy_(value)
            starts[value.dtype] += value.numel()
        return views

    def _take(self, part: PiecePart, gradient: torch.Tensor) -> None:
        assert part in self.pieces[self._on_device]
        assert gradient.shape == self.value(part).shape and gradient.dtype == self.value(part).dtype
        self.arrived.append(part)
        before = self.gradients.get(part)
        self.gradients[part] = gradient.clone() if before is None else before + gradient

    def go(self, sequence: Sequence[int], runs: Sequence[PieceRun]) -> None:
        """Bring the pieces of ``sequence`` one after another; every pass continues with each."""
        for piece in sequence:
            weights = self.upload(piece)
            for run in runs:
                run.advance(piece, weights)
        self.evict()
        waiting = [run.wanted for run in runs if not run.ended]
        assert not waiting, f"After {list(sequence)}, passes wait for the pieces {waiting}."

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter, put together from their parts."""
        found: dict[str, list[tuple[tuple[int, int], torch.Tensor]]] = {}
        for part, gradient in self.gradients.items():
            found.setdefault(part.name, []).append((part.experts or (0, 0), gradient))
        return {
            name: torch.cat([gradient for _, gradient in sorted(parts, key=lambda one: one[0])])
            for name, parts in found.items()
        }

    # -- whole passes ---------------------------------------------------------------------------------------------

    def forward(self, hidden: Sequence[torch.Tensor], calls: Sequence[BlockCalls]) -> list[torch.Tensor]:
        """All micro-batches' outputs, piece by piece."""
        with self.handles.bound(), torch.no_grad():
            runs = [
                PieceRun(lambda states=states, call=call: self.stack.block(self.layer, states, call))
                for states, call in zip(hidden, calls, strict=True)
            ]
            self.go(self.order.forward, runs)
        return [run.result() for run in runs]

    def backward(
        self, hidden: Sequence[torch.Tensor], calls: Sequence[BlockCalls], gradients: Sequence[torch.Tensor],
        piece_by_piece: bool = True, random_state: tuple[torch.Tensor, ...] | None = None,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Gradients of the micro-batches' inputs; those of weights add up in :attr:`gradients`."""
        leaves = [states.detach().requires_grad_() for states in hidden]

        def work(micro: int) -> None:
            output = self.stack.block(self.layer, leaves[micro], calls[micro])
            calls[micro].backward(output, gradients[micro])

        with self.handles.bound():
            runs = [
                PieceRun(lambda micro=micro: work(micro), random_state=random_state)
                for micro in range(len(leaves))
            ]
            sequence = [stage.piece for stage in self.order.backward]
            for group in [runs] if piece_by_piece else [[run] for run in runs]:
                self.go(sequence, group)
        found = [leaf.grad for leaf in leaves]
        assert all(gradient is not None for gradient in found)
        return [gradient for gradient in found if gradient is not None]


class OrdinaryBlock:
    """The same block with all of its parameters in memory.

    Args:
        stack: the model.
        layer: index of the block.
        weights: all parameters of the block by first name.
    """

    def __init__(self, stack: StreamedModel, layer: int, weights: Mapping[str, torch.Tensor]):
        self.stack, self.layer = stack, layer
        self.leaves = {
            name: torch.nn.Parameter(value.detach().clone(), stack.model.get_parameter(name).requires_grad)
            for name, value in weights.items()
        }

    def forward(self, hidden: torch.Tensor, calls: BlockCalls) -> torch.Tensor:
        with self.stack.bound(self.leaves), torch.no_grad():
            return self.stack.block(self.layer, hidden, calls)

    def backward(self, hidden: torch.Tensor, calls: BlockCalls, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient of the input; those of the weights add up in ``leaves``."""
        leaf = hidden.detach().requires_grad_()
        with self.stack.bound(self.leaves):
            calls.backward(self.stack.block(self.layer, leaf, calls), gradient)
        assert leaf.grad is not None
        return leaf.grad
