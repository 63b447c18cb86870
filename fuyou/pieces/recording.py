"""Runs a block without values, and records which of its pieces are needed for what."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from common.errors import FinetuneError, UserError
from fuyou.layout.record_parts import Piece, PiecePart
from fuyou.model.blocks.weightless import empty_parameter, on_meta, restored
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        for leaf in filter(_has_storage, tree_leaves(result)):
            storage = leaf.untyped_storage()
            identity, nbytes = storage._cdata, storage.nbytes()
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


_META = torch.device("meta")


@dataclass(frozen=True)
class Recording:
    """The pieces that one run of a block has needed."""

    uses: list[tuple[frozenset[int], Use]]  # What was needed for what, operator by operator
    complete: bool  # Whether that is all that any run may need; if not, what is used depends on values
    between_bytes: int  # Peak bytes per token when a forward pass requests another piece


class _UseRecorder:
    computes = False

    def __init__(self, stack: StreamedModel, pieces: Sequence[Piece], device: torch.device):
        self.uses: list[tuple[frozenset[int], Use]] = []
        self.live = LiveBytes()
        self.most_between = 0  # bytes at a request for another piece
        self._weights = {part: _empty(stack, part, device) for piece in pieces for part in piece}

    def need(self, pieces: frozenset[int], use: Use) -> Weights:
        """Record the use, and return all parameters: :meth:`fuyou.pieces.run.Supply.need`."""
        if self.uses and self.uses[-1][0] != pieces:
            self.most_between = max(self.most_between, self.live.now)
        self.uses.append((pieces, use))
        return self._weights


def _empty(stack: StreamedModel, part: PiecePart, device: torch.device) -> torch.Tensor:
    """Return a part on the meta device, or with arbitrary values that take next to no memory.

    Rows of the latter differ, so that a router sends tokens to several experts.
    """
    whole = stack.model.get_parameter(part.name)
    shape = list(whole.shape)
    if part.experts is not None:
        shape[0] = part.experts[1] - part.experts[0]
    dtype = stack.dtype_of(part.name)
    if device == _META:
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(shape), generator=generator).to(device, dtype)
    return values.as_strided(shape, [1] * len(shape))


def record(stack: StreamedModel, layer: int, pieces: Sequence[Piece], backward: bool) -> Recording:
    """Run a block without values: its forward pass, or with ``backward`` a recomputation and the backward pass.

    It runs on the meta device; where it looks at values (which experts have tokens), on the model's device with
    arbitrary weights that take next to no memory.

    Raises:
        UserError: if the block cannot be cut in pieces.
        Exception: of any kind, if the block's code fails without values.
    """
    try:
        return _run(stack, layer, pieces, backward, _META)
    except FinetuneError:
        raise
    except Exception:  # a family's code may fail in any way without values
        return _run(stack, layer, pieces, backward, stack.device)


def _run(stack: StreamedModel, layer: int, pieces: Sequence[Piece], backward: bool, device: torch.device) -> Recording:
    recorder = _UseRecorder(stack, pieces, device)

    def to_device(leaf: Any) -> Any:
        return torch.zeros_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf

    block = stack.blocks[layer]
    hidden, args, kwargs = tree_map(to_device, meta_call(stack, layer))
    if device != _META:
        hidden = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
    with _bound(stack, layer, pieces, device), supplying(recorder), torch.set_grad_enabled(backward):
        before = _tensors_held(block)
        with contextlib.nullcontext() if backward else recorder.live:  # only forward passes are parked together
            result = block(hidden.requires_grad_(backward), *args, **kwargs)
        if _tensors_held(block).keys() - before.keys():
            raise UserError(
                f"{type(stack.model).__name__} leaves values of a pass in modules of its blocks, which passes that "
                "take turns would mix up: it cannot be cut in pieces."
            )
        if backward:
            roots = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            with torch.autograd.set_multithreading_enabled(False):  # the supply is this thread's, on a GPU as well
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    tokens = hidden.numel() // hidden.shape[-1]
    between = -(-(hidden.nbytes + recorder.most_between) // tokens)
    return Recording(recorder.uses, device == _META, between)


def _tensors_held(block: nn.Module) -> dict[int, torch.Tensor]:
    return {
        id(leaf): leaf
        for module in block.modules()
        for name, value in module.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules")
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    }


@contextmanager
def _bound(stack: StreamedModel, layer: int, pieces: Sequence[Piece], device: torch.device) -> Iterator[None]:
    names = {part.name for piece in pieces for part in piece}
    trained = {name for name in names if stack.model.get_parameter(name).requires_grad}
    handles = PieceHandles(stack, layer, pieces, trained, lambda part, gradient: None, device)
    block = stack.blocks[layer]
    with on_meta(block) if device == _META else restored(block):
        if device != _META:
            for module in block.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = empty_parameter(parameter, device)
        with handles.bound():
            yield


def only_piece(pieces: frozenset[int], cut: Sequence[Piece]) -> int:
    """Return the piece that an operator needs.

    Raises:
        UserError: if it needs several.
    """
    if len(pieces) > 1:
        names = [cut[index][0].name for index in sorted(pieces)]
        raise UserError(f"One operator uses {' and '.join(names)}, which have been cut into different pieces.")
    return next(iter(pieces))
