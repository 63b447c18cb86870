"""Adapters of experts' parameters (peft's ``ParamWrapper``), range by range.

In an ordinary model peft adds a product of two factors to a whole parameter, all experts at once, before the module of
experts runs. Here the wrappers only pass on; each range's experts have their share of the product added where they are
computed. The factors are ordinary tensors on the device. Their gradients go through autograd: each expert's share comes
from its own range, and is zero if no token has come to it, as in the ordinary model.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper, _LoraFactorsProxy, _LoraParameterProxy
from torch import nn

from common.errors import UserError


@dataclass(frozen=True)
class Factors:
    """Two factors for each expert, whose product is added to its part of a parameter."""

    left: torch.Tensor  # `[E, rows, rank]`, in the adapter's dtype
    right: torch.Tensor  # `[E, rank, columns]`, in the adapter's dtype
    scaling: float  # What the product is multiplied by

    @staticmethod
    def of_all(wrapper: Any) -> "Factors":
        """Return what ``ParamWrapper.get_delta_factors`` does, without its cast: that makes copies for all experts."""
        adapter = only_adapter(wrapper)
        experts = wrapper.num_experts
        first = wrapper.lora_A[adapter].weight
        second = wrapper.lora_B[adapter].weight
        left = second.reshape(second.shape[0], -1, experts).permute(2, 0, 1)
        right = first.reshape(experts, -1, first.shape[-1])
        if not wrapper._did_swap_in_out_features:
            left, right = right.transpose(-2, -1), left.transpose(-2, -1)
        return Factors(left, right, wrapper.scaling[adapter])

    def of(self, first: int, last: int) -> "Factors":
        """Return the factors of experts ``[first, last)`` as leaves, which want gradients if these do."""
        left, right = (
            each.detach()[first:last].requires_grad_(each.requires_grad and torch.is_grad_enabled())
            for each in (self.left, self.right)
        )
        return replace(self, left=left, right=right)

    def added_to(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of weights ``[E, rows, columns]`` and the product, in their dtype, as peft computes it."""
        fold = _LoraFactorsProxy(self.left.to(weights.dtype), self.right.to(weights.dtype), self.scaling)
        return fold(weights)  # type: ignore[no-any-return]


def tensors_of(factors: Mapping[str, Factors]) -> list[torch.Tensor]:
    """Return all tensors of several factors, left and right alternating."""
    return [each for factor in factors.values() for each in (factor.left, factor.right)]


def parameter_wrappers(block: nn.Module) -> dict[nn.Module, list[ParamWrapper]]:
    """Return peft's wrappers of parameters in a block, outermost first, by the module that they are around."""
    wrappers: dict[nn.Module, list[ParamWrapper]] = {}
    for module in block.modules():
        if isinstance(module, ParamWrapper):
            wrappers.setdefault(module.get_base_layer(), []).append(module)
    return wrappers


@contextmanager
def replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Let a module compute by ``forward`` while the context is open."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def only_adapter(wrapper: Any) -> str:
    """Return the name of the only active adapter of one of peft's layers."""
    active = [adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A]
    if len(active) != 1 or wrapper.disable_adapters or wrapper.merged:
        raise UserError(
            f"The parameter {wrapper.parameter_name} has the active adapters {active}: in pieces there must be one, "
            "neither disabled nor merged."
        )
    return str(active[0])


@contextmanager
def adapted_forward(module: nn.Module, wrappers: Sequence[ParamWrapper]) -> Iterator[None]:
    """Let a module compute with its adapters of whole parameters while the context is open.

    Raises:
        UserError: if they adapt experts, which this module cannot compute in ranges.
    """
    for wrapper in wrappers:
        if wrapper.num_experts > 1:
            raise UserError(
                f"{type(module).__name__} has an adapter of {wrapper.parameter_name}, the weights of all experts, "
                "which this model does not compute through transformers' interface for experts: it cannot be added in "
                "pieces. Adapt other modules (--lora-targets), or give the device more memory."
            )

    def forward(*args: Any, **kwargs: Any) -> Any:
        adapted = copy.copy(module)
        parameters = dict(module._parameters)
        for wrapper in reversed(wrappers):
            delta = wrapper.get_delta_weight(only_adapter(wrapper))
            parameters[wrapper.parameter_name] = _LoraParameterProxy(delta)(
                parameters[wrapper.parameter_name]
            )
        adapted.__dict__["_parameters"] = parameters
        return adapted(*args, **kwargs)

    with replaced_forward(wrappers[0], forward):
        yield
