"""In which order a block's pieces are needed: learnt by running it on the meta device, where nothing is computed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fuyou.layout.pieces import Piece, PieceOrder, PiecePart, Stage
from fuyou.model.blocks.weightless import on_meta
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.handles import PieceHandles
from fuyou.pieces.meta_block import cut_off_layer, learn, meta_call
from fuyou.pieces.run import Use, Weights, supplying

_META = torch.device("meta")


class UseRecorder:
    """A supply of parameters on the meta device that records which pieces are needed for what.

    Args:
        stack: the model.
        pieces: what is cut from a block.
    """

    def __init__(self, stack: StreamedModel, pieces: Sequence[Piece]):
        self.uses: list[tuple[frozenset[int], Use]] = []
        self._weights = {part: self._empty(stack, part) for piece in pieces for part in piece}

    @staticmethod
    def _empty(stack: StreamedModel, part: PiecePart) -> torch.Tensor:
        whole = stack.model.get_parameter(part.name)
        shape = list(whole.shape)
        if part.experts is not None:
            shape[0] = part.experts[1] - part.experts[0]
        return torch.empty(shape, dtype=stack.dtype_of(part.name), device=_META)

    def need(self, pieces: frozenset[int], use: Use) -> Weights:
        """Record the use, and return all parameters: :meth:`fuyou.pieces.run.Supply.need`."""
        self.uses.append((pieces, use))
        return self._weights


def find_order(stack: StreamedModel, layer: int, pieces: Sequence[Piece]) -> PieceOrder:
    """Find the order in which a block's pieces are needed in the forward pass and in the backward pass.

    What is trained is what requires gradients in ``stack.model``. Pieces of experts are in it even if no token may
    come to them: a pass skips what it does not need. Blocks of one structure share one run.

    Raises:
        UserError: the block cannot be cut in pieces, or not in these.
    """
    inside = tuple(tuple((cut_off_layer(stack, layer, part.name), part.experts) for part in piece) for piece in pieces)
    return learn(stack, layer, ("order", inside), lambda: _order(stack, layer, pieces))


def record_forward(stack: StreamedModel, layer: int, pieces: Sequence[Piece]) -> list[frozenset[int]]:
    """Return the pieces that the operators of a block's forward pass need, operator by operator."""
    recorder = UseRecorder(stack, pieces)
    with _bound_on_meta(stack, layer, pieces, recorder), torch.no_grad():
        hidden, args, kwargs = meta_call(stack, layer)
        stack.blocks[layer](hidden, *args, **kwargs)
    return [needed for needed, _ in recorder.uses]


def _order(stack: StreamedModel, layer: int, pieces: Sequence[Piece]) -> PieceOrder:
    forward: list[int] = []
    for (piece,) in record_forward(stack, layer, pieces):
        if forward[-1:] != [piece]:
            forward.append(piece)
    recorder = UseRecorder(stack, pieces)
    with _bound_on_meta(stack, layer, pieces, recorder), torch.enable_grad():
        hidden, args, kwargs = meta_call(stack, layer)
        result = stack.blocks[layer](hidden.detach().requires_grad_(), *args, **kwargs)
        roots = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return PieceOrder(tuple(forward), tuple(_stages(recorder.uses)))


def _stages(uses: Sequence[tuple[frozenset[int], Use]]) -> Iterator[Stage]:
    """Join consecutive uses of the same piece."""
    current: int | None = None
    found: set[Use] = set()

    def stage(piece: int) -> Stage:
        return Stage(piece, Use.FORWARD in found, Use.BACKWARD in found, Use.GRADIENT in found)

    for (piece,), use in uses:
        if current is not None and piece != current:
            yield stage(current)
            found.clear()
        current = piece
        found.add(use)
    if current is not None:
        yield stage(current)


@contextmanager
def _bound_on_meta(stack: StreamedModel, layer: int, pieces: Sequence[Piece], recorder: UseRecorder) -> Iterator[Any]:
    names = {part.name for piece in pieces for part in piece}
    trained = {name for name in names if stack.model.get_parameter(name).requires_grad}
    handles = PieceHandles(stack, layer, pieces, trained, lambda part, gradient: None, _META)
    with on_meta(stack.blocks[layer]), handles.bound(), supplying(recorder):
        yield
