"""A block's parameters in pieces, as handles to bind to the model, and its mixtures' experts range by range.

A handle is a tensor without memory. Autograd saves the tensor that it is given, so it saves handles. Views of handles
are handles. Any other operator asks the thread's :class:`~fuyou.pieces.run.PieceRun` for the piece and runs on the real
parameters, in the backward pass as well as in the forward pass. No reference to real parameters is kept: after the
stage, what was there is overwritten.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from common.errors import FinetuneError, UserError
from common.models.structure import parameter_names
from fuyou.layout.record_parts import Piece, PiecePart
from fuyou.model.blocks.looped import looped_experts
from fuyou.model.expert_modules import expert_modules
from fuyou.model.operators import makes_views, written_arguments
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.expert_adapters import adapted_forward, parameter_wrappers
from fuyou.pieces.grouped_experts import GroupedExperts
from fuyou.pieces.looped_experts import LoopedExperts
from fuyou.pieces.meta_block import output_is_saved
from fuyou.pieces.run import PieceSource, Weights

_aten = torch.ops.aten
# What autograd does with a gradient before it stores it.
_PASSED_ON = (_aten.detach.default, _aten.clone.default, _aten.alias.default)


@dataclass(frozen=True, eq=False)
class Origin:
    """The parameter that a handle represents."""

    source: PieceSource
    name: str  # First name of the parameter
    parts: tuple[PiecePart, ...]  # The parts that hold the parameter; several if it is cut by experts


class Handle(torch.Tensor):
    """A tensor without memory that represents a parameter, or a view of it."""

    # Its shape, strides, offset and dtype, as a view of the whole parameter on the meta device
    geometry: torch.Tensor
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
        handle.geometry = geometry
        handle.origin = origin
        return handle

    def in_memory(self, weights: Weights) -> torch.Tensor:
        """Return the memory that the handle represents."""
        assert self.origin is not None
        (part,), geometry = self.origin.parts, self.geometry
        value = weights[part]
        if value.dtype != geometry.dtype:
            value = value.to(geometry.dtype)
        begin = 0 if part.experts is None else part.experts[0] * _expert_elements(self.origin, value)
        first = value.storage_offset() + geometry.storage_offset() - begin
        return value.as_strided(geometry.shape, geometry.stride(), first)

    def data_ptr(self) -> int:
        """Refuse: there is no memory that a kernel could be given."""
        name = _name(self)
        raise UserError(
            f"The block gives the address of {name} to a custom kernel: it cannot be cut in pieces."
        )

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
        args, kwargs = tree_map_only(Handle, lambda handle: handle.in_memory(weights), (args, kwargs))
        return func(*args, **kwargs)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    handle = args[0]
    if not isinstance(handle, Handle):  # such as a view as another tensor's shape
        raise FinetuneError(f"{func} received a parameter in pieces as a plain argument.")
    if func is _aten.view.dtype:
        raise UserError(
            f"The block reads the bytes of {_name(handle)} in another dtype: it cannot be cut in pieces."
        )
    views = func(handle.geometry, *args[1:], **kwargs)

    def handle_of(view: torch.Tensor) -> Handle:
        origin = handle.origin
        if (
            func is _aten.select.int
            and args[1] % handle.dim() == 0
            and origin is not None
            and len(origin.parts) > 1
        ):
            expert = args[2] % len(handle)
            origin = replace(origin, parts=tuple(part for part in origin.parts if _holds(part, expert)))
        return Handle.make(view, origin, handle.device)

    return tree_map_only(torch.Tensor, handle_of, views)


def _holds(part: PiecePart, expert: int) -> bool:
    return part.experts is not None and part.experts[0] <= expert < part.experts[1]


def _expert_elements(origin: Origin, value: torch.Tensor) -> int:
    """Return the elements of each expert, of the value of a range of them."""
    (part,) = origin.parts
    assert part.experts is not None
    return value.numel() // (part.experts[1] - part.experts[0])


def _pass_on(func: Any, handle: Handle) -> Handle:
    if func not in _PASSED_ON:
        raise FinetuneError(
            f"{func} was called on a gradient that has been handed on: two backward passes at once."
        )
    return Handle.make(handle.geometry, None, handle.device)


def _refuse(func: Any, args: Any, origins: Sequence[Origin]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if isinstance(value, Handle) and argument.name in written_arguments(func):
            raise UserError(
                f"The block changes its parameter {_name(value)} ({func}): it cannot be cut in pieces."
            )
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
    geometry = leaf.geometry
    device = leaf.device

    def replace(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        take(gradient)
        return Handle.make(geometry, None, device)

    def forget(stored: torch.Tensor) -> None:
        stored.grad = None

    leaf.register_hook(replace)
    leaf.register_post_accumulate_grad_hook(forget)


def expert_parameters(
    stack: StreamedModel, layer: int, names: Collection[str]
) -> list[tuple[tuple[str, ...], int]]:
    """Return, for each mixture of a block, the parameters with one matrix per expert, and the number of experts.

    All must be among ``names``, the first names of the parameters that are to be cut.
    """
    mixtures = []
    for prefix, module in expert_modules(stack, layer):
        experts = int(module.num_experts)  # type: ignore[arg-type]
        members = {
            f"{prefix}.{name}"
            for name, value in module._parameters.items()
            if value is not None and value.dim() > 1 and value.shape[0] == experts
        }
        if members - set(names):
            raise UserError(
                f"The experts of {prefix} are trained next to frozen parameters of their block, in a separate "
                "record that cannot be cut in pieces: train all of the block or adapters (--lora-rank), "
                "or give more --device-memory, so that a whole block fits."
            )
        if members:
            mixtures.append((tuple(name for name in names if name in members), experts))
    for prefix, module in looped_experts(stack.blocks[layer], f"{stack.block_prefix}.{layer}"):
        fused = {f"{prefix}.{name}": value for name, value in module._parameters.items() if value is not None}
        fused = {name: value for name, value in fused.items() if name in names and value.dim() == 3}
        if any(value.requires_grad for value in fused.values()):
            raise UserError(
                f"The experts of {prefix} are computed one by one by code of the family, which makes one gradient of "
                "all of them: they cannot be trained in pieces. Train adapters of other layers (--lora-rank), or give "
                "more --device-memory, so that a whole block fits."
            )
        if fused:
            # Of unequal ones, the rows that only some have belong to no expert (LongCat's identities).
            mixtures.append((tuple(fused), min(len(value) for value in fused.values())))
    return mixtures


def _check_experts(prefix: str, module: Any) -> None:
    norm = getattr(module, "post_expert_norm", None)
    if getattr(module, "has_post_expert_norm", False) and (
        norm is None or any(True for _ in norm.parameters())
    ):
        raise UserError(
            f"The experts of {prefix} are followed by a norm with parameters inside their module, whose gradient would "
            "be lost: they cannot be cut in pieces."
        )
    chosen = module.config._experts_implementation or "eager"
    if chosen != "grouped_mm":
        raise UserError(
            f"The experts of {prefix} use transformers' implementation {chosen!r}, which cannot be cut in pieces: use "
            "grouped_mm."
        )


class PieceHandles:
    """The parameters of a block that are in pieces, as handles.

    Args:
        trained: first names of the parameters whose gradients are wanted.
        on_gradient: called with a part and its gradient, as :class:`PieceSource` calls it.
        device: where handles pretend to be; None: where ``stack`` computes.
    """

    def __init__(
        self,
        stack: StreamedModel,
        layer: int,
        pieces: Sequence[Piece],
        trained: Collection[str],
        on_gradient: Callable[[PiecePart, torch.Tensor], None],
        device: torch.device | None = None,
    ):
        self.parameters: dict[str, torch.Tensor] = {}  # Handles by all names of the parameters
        self._stack = stack
        self._device = device or stack.device
        self._trained = frozenset(trained)
        self.source = PieceSource(pieces, on_gradient)
        parts: dict[str, list[PiecePart]] = {}
        for part in self.source.piece_of:
            parts.setdefault(part.name, []).append(part)
        aliases = {names[0]: names for names in parameter_names(stack.model)}
        for name, ranges in parts.items():
            ranges.sort(key=lambda part: part.experts or (0, 0))
            self.parameters.update(dict.fromkeys(aliases[name], self._leaf(name, tuple(ranges))))
        self._computations = self._own_computations(layer, parts)

    def _leaf(self, name: str, parts: tuple[PiecePart, ...]) -> Handle:
        meta = self._stack.model.get_parameter(name)
        geometry = torch.empty(meta.shape, dtype=self._stack.dtype_of(name), device="meta")
        leaf = Handle.make(geometry, Origin(self.source, name, parts), self._device)
        if name in self._trained:
            leaf.requires_grad_()
            if parts[0].experts is None:
                hand_on(leaf, lambda gradient: self.source.take_gradient(parts[0], gradient))
        return leaf

    def _own_computations(
        self, layer: int, parts: Mapping[str, Sequence[PiecePart]]
    ) -> list[Callable[[], AbstractContextManager[None]]]:
        """Return what lets modules compute otherwise: experts in ranges, and adapters of whole parameters."""
        computations: list[Callable[[], AbstractContextManager[None]]] = []
        wrappers = parameter_wrappers(self._stack.blocks[layer])
        for prefix, module in expert_modules(self._stack, layer):
            around = wrappers.pop(module, [])
            names = [f"{prefix}.{name}" for name in module._parameters]
            cut = {
                name: parts[name] for name in names if name in parts and parts[name][0].experts is not None
            }
            if cut:
                _check_experts(prefix, module)
                skips = not output_is_saved(self._stack, layer, prefix)
                computations.append(
                    GroupedExperts(module, self.source, cut, self._trained, around, skips).bound
                )
        block = self._stack.blocks[layer]
        for prefix, module in looped_experts(block, f"{self._stack.block_prefix}.{layer}"):
            names = [f"{prefix}.{name}" for name in module._parameters]
            cut = {
                name: parts[name] for name in names if name in parts and parts[name][0].experts is not None
            }
            if cut and module not in wrappers:
                computations.append(LoopedExperts(module, self.source, cut).bound)
        return computations + [
            partial(adapted_forward, module, around) for module, around in wrappers.items()
        ]

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the block use the handles while the context is open.

        It must be open around all passes that use them, from before the first begins until the last has ended.
        """
        with ExitStack() as opened:
            opened.enter_context(self._stack.bound(self.parameters))
            for computation in self._computations:
                opened.enter_context(computation())
            yield
