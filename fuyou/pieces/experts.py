"""A mixture's experts, range by range: which modules of a block have them."""

from collections.abc import Collection, Iterator

from torch import nn

from fuyou.model.streamed_model import StreamedModel

_INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed", "_is_expert_parallel")
"""Attributes that transformers' ``use_experts_implementation`` gives a module."""


def expert_modules(stack: StreamedModel, layer: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a block, with their full names, whose experts can be cut in ranges."""
    for name, module in stack.blocks[layer].named_modules(prefix=f"{stack.block_prefix}.{layer}"):
        if all(hasattr(module, attribute) for attribute in _INTERFACE):
            yield name, module


def expert_parameters(stack: StreamedModel, layer: int, names: Collection[str]) -> list[tuple[tuple[str, ...], int]]:
    """Return, for each mixture of a block, the parameters with one matrix per expert, and the number of experts."""
    found = []
    for prefix, module in expert_modules(stack, layer):
        experts = int(module.num_experts)  # type: ignore[arg-type]
        own = [
            f"{prefix}.{name}"
            for name, value in module._parameters.items()
            if value is not None and value.dim() > 1 and value.shape[0] == experts
        ]
        mine = tuple(name for name in own if name in names)
        if mine:
            found.append((mine, experts))
    return found
