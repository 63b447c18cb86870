"""Blocks on the meta device: their calls, and what makes two blocks of one model equal but for their weights."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from common.errors import FinetuneError, UserError
from fuyou.model.streamed_model import StreamedModel

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
