"""Runs a block without values, and records which of its pieces are needed for what."""

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import UserError
from fuyou.layout.record_parts import Piece, PiecePart
from fuyou.model.blocks.weightless import on_meta
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.handles import PieceHandles
from fuyou.pieces.meta_block import meta_call
from fuyou.pieces.run import Use, Weights, supplying


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors made while this is active that still exist, and most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        for leaf in filter(_has_storage, tree_leaves(result)):
            storage = leaf.untyped_storage()
            identity = storage._cdata
            nbytes = storage.nbytes()
            if nbytes and identity not in given and identity not in self._seen:
                self._seen.add(identity)
                self.now += nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, identity, nbytes)
        return result

    def _gone(self, identity: int, nbytes: int) -> None:
        self._seen.discard(identity)
        self.now -= nbytes


def _has_storage(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, torch.nn.Parameter)


Uses = list[tuple[frozenset[int], Use]]  # Which pieces an operator has needed for what, operator by operator


class _UseRecorder:
    computes = False

    def __init__(self, stack: StreamedModel, pieces: Sequence[Piece]):
        self.uses: Uses = []
        self.live = LiveBytes()
        self.most_between = 0  # bytes at a request for another piece
        self._weights = {part: _empty(stack, part) for piece in pieces for part in piece}

    def need(self, pieces: frozenset[int], use: Use) -> Weights:
        """Record the use, and return all parameters: :meth:`fuyou.pieces.run.Supply.need`."""
        if self.uses and self.uses[-1][0] != pieces:
            self.most_between = max(self.most_between, self.live.now)
        self.uses.append((pieces, use))
        return self._weights


def _empty(stack: StreamedModel, part: PiecePart) -> torch.Tensor:
    whole = stack.model.get_parameter(part.name)
    rows = whole.shape[:1] if part.experts is None else (part.experts[1] - part.experts[0],)
    return torch.empty((*rows, *whole.shape[1:]), dtype=stack.dtype_of(part.name), device="meta")


def record(stack: StreamedModel, layer: int, pieces: Sequence[Piece], backward: bool) -> tuple[Uses, int]:
    """Run a block on the meta device: its forward pass, or with ``backward`` a recomputation and the backward pass.

    Returns:
        The pieces that it has needed, and the peak bytes per token when a forward pass requested another piece.

    Raises:
        Exception: of any kind, if the block cannot be cut in pieces, or its code fails without values.
    """
    recorder = _UseRecorder(stack, pieces)
    block = stack.blocks[layer]
    hidden, args, kwargs = meta_call(stack, layer)
    hidden = hidden.detach().requires_grad_(backward)
    trained = {
        part.name for piece in pieces for part in piece if stack.model.get_parameter(part.name).requires_grad
    }
    handles = PieceHandles(stack, layer, pieces, trained, lambda part, gradient: None, hidden.device)
    with on_meta(block), handles.bound(), supplying(recorder), torch.set_grad_enabled(backward):
        before = _tensors_held(block)
        with contextlib.nullcontext() if backward else recorder.live:
            # Only forward passes are parked together
            result = block(hidden, *args, **kwargs)
        if _tensors_held(block).keys() - before.keys():
            raise UserError(
                f"{type(stack.model).__name__} leaves values of a pass in modules of its blocks, which passes that "
                "take turns would mix up: it cannot be cut in pieces."
            )
        if backward:
            roots = [
                leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    tokens = hidden.numel() // hidden.shape[-1]
    return recorder.uses, (-(-(hidden.nbytes + recorder.most_between) // tokens))


def _tensors_held(block: nn.Module) -> dict[int, torch.Tensor]:
    return {
        id(leaf): leaf
        for module in block.modules()
        for name, value in module.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules")
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    }
