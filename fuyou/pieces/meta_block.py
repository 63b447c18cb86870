"""Blocks on the meta device: their calls, what makes two of them equal but for their weights, and what they save."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from common.errors import FinetuneError, UserError
from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.blocks.weightless import on_meta
from fuyou.model.expert_modules import expert_modules
from fuyou.model.recompute.block_trace import Tracer
from fuyou.model.streamed_model import StreamedModel

T = TypeVar("T")
Call = tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]

# For each model: answers by question and block, and for each block and each structure the first block that has it
_LEARNT: WeakKeyDictionary[StreamedModel, dict[Hashable, Any]] = WeakKeyDictionary()


def meta_call(stack: StreamedModel, layer: int) -> Call:
    """Return hidden states, and the other arguments that block ``layer`` is called with, on the meta device."""
    if stack.links.shared:
        raise UserError(
            f"{type(stack.model).__name__} hands values from block to block in a dictionary, which blocks in pieces "
            "cannot: give the device more memory, so that a whole block fits."
        )
    return stack.meta_calls[layer]


def cut_off_layer(stack: StreamedModel, layer: int, name: str) -> str:
    return name.removeprefix(f"{stack.block_prefix}.{layer}.")


def learn(stack: StreamedModel, layer: int, question: Hashable, answer: Callable[[], T]) -> T:
    """Return what ``answer`` returns; blocks of one structure share the answer to a ``question``."""
    known = _LEARNT.setdefault(stack, {})
    if layer not in known:
        known[layer] = known.setdefault(_structure(stack, layer), layer)
    key = (question, known[layer])
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


def _structure(stack: StreamedModel, layer: int) -> Hashable:
    """Return what decides which operators a block runs on which parameters; its place among the others does not."""
    described: list[Hashable] = [stack.model.training]
    for name, module in stack.blocks[layer].named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(module.__dict__.items())
            if isinstance(value, bool | int | float | str)
            and not (value == layer and key.startswith("layer"))
        )
        parameters = tuple(
            (key, tuple(value.shape), value.dtype, value.requires_grad)
            for key, value in module._parameters.items()
            if value is not None
        )
        described.append((name, type(module), plain, parameters))
    hidden, args, kwargs = meta_call(stack, layer)
    described.append((tuple(hidden.shape), BlockCalls(arguments=[(args, kwargs)]).describe(0)))
    return tuple(described)


def output_is_saved(stack: StreamedModel, layer: int, name: str) -> bool:
    """Return whether anything that depends on the output of the module ``name`` is saved for the backward pass."""
    question = ("saves", cut_off_layer(stack, layer, name))
    return learn(stack, layer, question, lambda: _saves(stack, layer, stack.model.get_submodule(name)))


def _saves(stack: StreamedModel, layer: int, module: nn.Module) -> bool:
    calls: list[int] = []  # those that make the module's output

    def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        calls.append(len(tracer.operators))
        return torch.empty_like(hidden).requires_grad_()

    block = stack.blocks[layer]
    with on_meta(block), torch.enable_grad():
        for _, other in expert_modules(stack, layer):  # whose implementations may not run here
            other.forward = lambda hidden, *_, **__: hidden * 1.0  # type: ignore[method-assign]
        module.forward = forward  # type: ignore[method-assign]
        hidden, args, kwargs = meta_call(stack, layer)
        with Tracer() as tracer:
            result = block(hidden.detach().requires_grad_(), *args, **kwargs)
    trace = tracer.finish(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
    return not trace.prunes or not trace.made_from(trace.saved).isdisjoint(calls)
