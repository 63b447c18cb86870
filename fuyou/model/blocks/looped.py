"""Experts that a family's own code computes one by one: which are chosen, it asks their values."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed")
"""Attributes that ``use_experts_implementation`` gives a module in transformers 5.17 and later."""
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def looped_experts(block: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, with their full names, that hold all experts' weights and compute these one by one."""
    for name, module in block.named_modules(prefix=prefix):
        fused = any(value is not None and value.dim() == 3 for value in module._parameters.values())
        is_common = all(hasattr(module, attribute) for attribute in INTERFACE)
        if (
            fused
            and not is_common
            and tuple(inspect.signature(type(module).forward).parameters)[1:] == _ARGUMENTS
        ):
            yield name, module


def leave_out_loops(block: nn.Module) -> None:
    """Let such modules return hidden states of the right shape, until the block is restored."""

    def forward(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.empty_like(hidden_states)

    for _, module in looped_experts(block):
        module.forward = forward  # type: ignore[method-assign]
