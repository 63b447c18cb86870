"""Blocks on the meta device: their calls, and what makes two blocks of one model equal but for their weights."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from common.errors import FinetuneError, UserError
from fuyou.model.streamed_model import StreamedModel

TOKENS = 8
"""Tokens of the row that blocks are run on."""
T = TypeVar("T")
Call = tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]

_CALLS: WeakKeyDictionary[StreamedModel, list[Call]] = WeakKeyDictionary()
_LEARNT: WeakKeyDictionary[StreamedModel, dict[Hashable, Any]] = WeakKeyDictionary()


def meta_call(stack: StreamedModel, layer: int) -> Call:
    """Return hidden states, and the other arguments that block ``layer`` is called with, on the meta device.

    Raises:
        UserError: the block's call cannot be made there.
    """
    if stack not in _CALLS:
        if stack.links.shared:
            raise UserError(
                f"{type(stack.model).__name__} hands values from block to block in a dictionary, which blocks in "
                "pieces cannot: give the device more memory, so that a whole block fits."
            )
        _CALLS[stack] = stack.meta_calls(TOKENS)
    return _CALLS[stack][layer]


def cut_off_layer(stack: StreamedModel, layer: int, name: str) -> str:
    """Return a parameter's name inside its block."""
    return name.removeprefix(f"{stack.block_prefix}.{layer}.")


def learn(stack: StreamedModel, layer: int, question: Hashable, answer: Callable[[], T]) -> T:
    """Return what ``answer`` returns; blocks of one structure share the answer to a ``question``.

    Raises:
        UserError: the block does not run on the meta device.
    """
    known = _LEARNT.setdefault(stack, {})
    key = (question, _structure(stack, layer))
    if key not in known:
        try:
            known[key] = answer()
        except FinetuneError:
            raise
        except Exception as error:  # whatever a family's own code does without values
            raise UserError(
                f"Block {layer} of {type(stack.model).__name__} cannot be cut in pieces: running it without values, to "
                f"learn the order of its parameters, failed ({type(error).__name__}: {error})."
            ) from error
    answered: T = known[key]
    return answered


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
