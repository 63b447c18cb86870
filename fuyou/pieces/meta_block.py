"""Blocks on the meta device: their calls, what makes two of them equal but for their weights, and what they save."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import FinetuneError, UserError
from fuyou.model.blocks.weightless import on_meta
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.expert_adapters import AdaptedModule, ExpertAdapters

T = TypeVar("T")
Call = tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]

_LEARNT: WeakKeyDictionary[StreamedModel, dict[Hashable, Any]] = WeakKeyDictionary()
_STRUCTURES: WeakKeyDictionary[StreamedModel, dict[int, Hashable]] = WeakKeyDictionary()


def meta_call(stack: StreamedModel, layer: int) -> Call:
    """Return hidden states, and the other arguments that block ``layer`` is called with, on the meta device.

    Raises:
        UserError: if the block cannot be called there.
    """
    if stack.links.shared:
        raise UserError(
            f"{type(stack.model).__name__} hands values from block to block in a dictionary, which blocks in pieces "
            "cannot: give the device more memory, so that a whole block fits."
        )
    return stack.meta_calls[layer]


def cut_off_layer(stack: StreamedModel, layer: int, name: str) -> str:
    return name.removeprefix(f"{stack.block_prefix}.{layer}.")


@contextmanager
def unchanged(stack: StreamedModel) -> Iterator[None]:
    """Inspect each block of ``stack`` only once: nothing changes it in this context."""
    if stack in _STRUCTURES:
        yield
        return
    _STRUCTURES[stack] = {}
    try:
        yield
    finally:
        del _STRUCTURES[stack]


def learn(stack: StreamedModel, layer: int, question: Hashable, answer: Callable[[], T]) -> T:
    """Return what ``answer`` returns; blocks of one structure share the answer to a ``question``.

    Raises:
        UserError: if the block does not run on the meta device.
    """
    known = _LEARNT.setdefault(stack, {})
    structures = _STRUCTURES.get(stack, {})
    if layer not in structures:
        structures[layer] = _Structure(_structure(stack, layer))
    key = (question, structures[layer])
    if key not in known:
        try:
            known[key] = answer()
        except FinetuneError:
            raise
        except Exception as error:  # a family's code may fail in any way without values
            raise UserError(
                f"Block {layer} of {type(stack.model).__name__} cannot be cut in pieces: running it without values, to "
                f"learn the order of its parameters, failed ({type(error).__name__}: {error})."
            ) from error
    answered: T = known[key]
    return answered


class _Structure:
    """What a block is made of: thousands of values, which are hashed once."""

    def __init__(self, described: Hashable):
        self._described, self._hash = described, hash(described)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and (self is other or self._described == other._described)


def _structure(stack: StreamedModel, layer: int) -> Hashable:
    """Return what decides which operators a block runs on which parameters; its place among the others does not."""
    described: list[Hashable] = [stack.model.training]
    for name, module in stack.blocks[layer].named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(module.__dict__.items())
            if isinstance(value, bool | int | float | str) and not (value == layer and key.startswith("layer"))
        )
        parameters = tuple(
            (key, tuple(value.shape), value.dtype, value.requires_grad)
            for key, value in module._parameters.items()
            if value is not None
        )
        described.append((name, type(module), plain, parameters))
    hidden, args, kwargs = meta_call(stack, layer)
    leaves = tree_leaves((hidden, args, [kwargs[name] for name in sorted(kwargs)]))
    described.append(tuple(sorted(kwargs)))
    described += [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor | bool | int | float | str | None)
    ]
    return tuple(described)


Adapters = ExpertAdapters | AdaptedModule


def output_is_saved(stack: StreamedModel, layer: int, name: str, adapters: Sequence[Adapters] = ()) -> bool:
    """Return whether anything that depends on the output of the module ``name`` is saved for the backward pass.

    Raises:
        UserError: if the block does not run on the meta device.
    """
    question = ("saves", cut_off_layer(stack, layer, name))
    return learn(stack, layer, question, lambda: _saves(stack, layer, stack.model.get_submodule(name), adapters))


def _saves(stack: StreamedModel, layer: int, module: nn.Module, adapters: Sequence[Adapters]) -> bool:
    marks = _Marks()

    def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        result = torch.empty_like(hidden).requires_grad_()
        marks.mark(result)
        return result

    block = stack.blocks[layer]
    others = [other for other in block.modules() if other is not module and "_is_expert_parallel" in other.__dict__]
    with on_meta(block), torch.enable_grad(), ExitStack() as opened:
        for each in adapters:
            opened.enter_context(each.bound())
        for other in others:  # which their own way to compute may not do here
            other.forward = lambda hidden, *_, **__: hidden * 1.0  # type: ignore[method-assign]
        module.forward = forward  # type: ignore[method-assign]
        hidden, args, kwargs = meta_call(stack, layer)
        with torch.autograd.graph.saved_tensors_hooks(marks.see, lambda value: value), marks:
            result = block(hidden.detach().requires_grad_(), *args, **kwargs)
    return marks.seen or _has_custom_function(result)


class _Marks(TorchDispatchMode):
    """Marks what is made from marked tensors, and notices when autograd saves a marked one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self._marked: dict[int, torch.UntypedStorage] = {}  # kept, so that no other memory gets a marked one's identity

    def mark(self, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        self._marked[storage._cdata] = storage

    def see(self, value: torch.Tensor) -> torch.Tensor:
        self.seen |= self._has(value)
        return value

    def _has(self, value: torch.Tensor) -> bool:
        return value.untyped_storage()._cdata in self._marked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(self._has(value) for value in given):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                    self.mark(value)
            for value in tree_leaves(result):
                if isinstance(value, torch.Tensor):
                    self.mark(value)
        return result


def _has_custom_function(result: Any) -> bool:
    """Return whether a custom autograd function is behind a result: it may hold what nobody sees it save."""
    todo: list[Any] = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return True
            todo.extend(earlier for earlier, _ in node.next_functions)
    return False
