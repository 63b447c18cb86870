"""Tensors without memory that represent a block's parameters while it is computed in pieces.

Autograd saves the tensor that it is given, so it saves handles, and they take no memory. Views of handles are handles.
Any other operator asks the thread's :class:`~fuyou.pieces.run.PieceRun` for the piece and runs on the real parameters,
in the backward pass as well as in the forward pass. No reference to real parameters is kept: after the stage, what was
there is overwritten.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from common.errors import FinetuneError, UserError
from fuyou.layout.record_parts import Piece, PiecePart
from fuyou.model.operators import makes_views, written_arguments
from fuyou.pieces.run import Use, Weights, current_supply

_aten = torch.ops.aten
# What autograd does with a gradient before it stores it.
_PASSED_ON = (_aten.detach.default, _aten.clone.default, _aten.alias.default)


class PieceSource:
    """Where handles get real parameters from, and where their gradients go.

    Args:
        pieces: the parts that each piece of the block holds.
        on_gradient: called with a part and its gradient, in the dtype of the weights, as soon as autograd has it. It
            must copy what it wants to keep, and may be called for several micro-batches in turn.
    """

    def __init__(self, pieces: Sequence[Piece], on_gradient: Callable[[PiecePart, torch.Tensor], None]):
        self.piece_of = {part: index for index, piece in enumerate(pieces) for part in piece}
        self.on_gradient = on_gradient

    def fetch(self, parts: Collection[PiecePart], use: Use | None = None) -> Weights:
        """Return the parameters of these parts, and wait until they are on the device.

        ``use`` is what for; None: operators of the pass that is running.
        """
        if use is None:
            use = Use.FORWARD if torch._C._current_graph_task_id() == -1 else Use.BACKWARD
        return current_supply().need(frozenset(self.piece_of[part] for part in parts), use)

    def take_gradient(self, part: PiecePart, gradient: torch.Tensor) -> None:
        """Pass on the gradient of ``part``, once its piece is on the device."""
        weights = self.fetch((part,), Use.GRADIENT)
        self.on_gradient(part, gradient.to(weights[part].dtype))


@dataclass(frozen=True, eq=False)
class Origin:
    """The parameter that a handle represents."""

    source: PieceSource
    name: str  # First name of the parameter
    parts: tuple[PiecePart, ...]  # The parts that hold the parameter; several if it is cut by experts


class Handle(torch.Tensor):
    """A tensor without memory that represents a parameter, or a view of it."""

    geometry: torch.Tensor  # Its shape, strides, offset and dtype, as a view of the whole parameter on the meta device
    origin: Origin | None  # None: it represents a gradient that has been passed on

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(geometry: torch.Tensor, origin: Origin | None, device: torch.device) -> "Handle":
        handle: Handle = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Handle,
            geometry.shape,
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=geometry.dtype,
            device=device,
        )
        handle.geometry, handle.origin = geometry, origin
        return handle

    def in_memory(self, weights: Weights) -> torch.Tensor:
        """Return the memory that the handle represents."""
        assert self.origin is not None
        (part,), geometry = self.origin.parts, self.geometry
        value = weights[part]
        if value.dtype != geometry.dtype:
            value = value.to(geometry.dtype)
        if not value.is_contiguous():  # arbitrary values that take next to no memory
            fits = sum(geometry.shape) <= value.untyped_storage().nbytes() // value.itemsize
            return value.as_strided(geometry.shape, [int(fits and stride > 0) for stride in geometry.stride()])
        first = value.storage_offset() + geometry.storage_offset()
        return value.as_strided(geometry.shape, geometry.stride(), first)

    def __repr__(self) -> str:  # type: ignore[override]
        name = "a gradient that has been handed on" if self.origin is None else self.origin.name
        return f"Handle({name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def data_ptr(self) -> int:
        """Refuse: there is no memory that a kernel could be given."""
        name = _name(self)
        raise UserError(f"The block gives the address of {name} to a custom kernel: it cannot be cut in pieces.")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handles = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Handle)]
        origins = [handle.origin for handle in handles if handle.origin is not None]
        if len(origins) < len(handles):
            return _pass_on(func, handles[0])
        if makes_views(func):
            return _view(func, args, kwargs)
        _refuse(func, args, origins)
        parts = [part for origin in origins for part in origin.parts]
        weights = origins[0].source.fetch(parts)

        def real(leaf: Any) -> Any:
            return leaf.in_memory(weights) if isinstance(leaf, Handle) else leaf

        return func(*tree_map(real, args), **tree_map(real, kwargs))


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    handle = args[0]
    if not isinstance(handle, Handle):  # such as a view as another tensor's shape
        raise FinetuneError(f"{func} received a parameter in pieces as a plain argument.")
    if func is _aten.view.dtype:
        raise UserError(f"The block reads the bytes of {_name(handle)} in another dtype: it cannot be cut in pieces.")

    def wrap(leaf: Any) -> Any:
        return Handle.make(leaf, handle.origin, handle.device) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(wrap, func(handle.geometry, *args[1:], **kwargs))


def _pass_on(func: Any, handle: Handle) -> Handle:
    if func not in _PASSED_ON:
        raise FinetuneError(f"{func} was called on a gradient that has been handed on: two backward passes at once.")
    return Handle.make(handle.geometry, None, handle.device)


def _refuse(func: Any, args: Any, origins: Sequence[Origin]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if isinstance(value, Handle) and argument.name in written_arguments(func):
            raise UserError(f"The block changes its parameter {_name(value)} ({func}): it cannot be cut in pieces.")
    for origin in origins:
        if len(origin.parts) > 1:
            raise UserError(
                f"The block uses {origin.name} of all experts in one operator ({func}): experts cannot be cut in "
                "ranges here. Use transformers' implementation grouped_mm, or a larger device."
            )


def _name(handle: Handle) -> str:
    return "" if handle.origin is None else handle.origin.name


def hand_on(leaf: Handle, take: Callable[[torch.Tensor], None]) -> None:
    """Let ``take`` have the gradient of ``leaf`` as soon as autograd has it, and let nothing stay in its place."""
    geometry, device = leaf.geometry, leaf.device

    def replace(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        take(gradient)
        return Handle.make(geometry, None, device)

    def forget(stored: torch.Tensor) -> None:
        stored.grad = None

    leaf.register_hook(replace)
    leaf.register_post_accumulate_grad_hook(forget)
