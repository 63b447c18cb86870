"""Adapters of experts' parameters (peft's ``ParamWrapper``), range by range.

In an ordinary model peft adds a product of two factors to a whole parameter, all experts at once, before the module of
experts runs. Here the wrappers only pass on; each range's experts have their share of the product added where they are
computed. The factors are ordinary tensors on the device. Their gradients go through autograd: each expert's share comes
from its own range, and is zero if no token has come to it, as in the ordinary model.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import peft
import torch
from peft.tuners.lora import layer as peft_layers
from peft.tuners.lora.layer import ParamWrapper, _LoraParameterProxy
from torch import nn

from common.errors import UserError


@dataclass(frozen=True)
class Factors:
    """Two factors for each expert, whose product is added to its part of a parameter."""

    left: torch.Tensor  # `[E, rows, rank]`, in the adapter's dtype
    right: torch.Tensor  # `[E, rank, columns]`, in the adapter's dtype
    scaling: float  # What the product is multiplied by

    def of(self, first: int, last: int) -> "Factors":
        """Return the factors of experts ``[first, last)`` as leaves, which want gradients if these do."""
        left, right = (
            each.detach()[first:last].requires_grad_(each.requires_grad and torch.is_grad_enabled())
            for each in (self.left, self.right)
        )
        return replace(self, left=left, right=right)

    def added_to(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of weights ``[E, rows, columns]`` and the product, in their dtype, as peft computes it."""
        fold = peft_layers._LoraFactorsProxy(self.left.to(weights.dtype), self.right.to(weights.dtype), self.scaling)
        return fold(weights)  # type: ignore[no-any-return]


def tensors_of(factors: Mapping[str, Factors]) -> list[torch.Tensor]:
    """Return all tensors of several factors, left and right alternating."""
    return [each for factor in factors.values() for each in (factor.left, factor.right)]


class ExpertAdapters:
    """The adapters of one module of experts.

    Args:
        wrappers: what peft has put around the module, by the parameter that each adapts.
    """

    def __init__(self, wrappers: Mapping[str, ParamWrapper]):
        self.wrappers = dict(wrappers)

    @staticmethod
    def around(model: nn.Module, path: str) -> "ExpertAdapters":
        """Return the adapters around the module at ``path``.

        Raises:
            UserError: if this version of peft adds them in another way.
        """
        wrappers: dict[str, ParamWrapper] = {}
        while path.endswith(".base_layer"):
            path = path.removesuffix(".base_layer")
            wrapper: Any = model.get_submodule(path)
            if isinstance(wrapper, ParamWrapper):
                wrappers[wrapper.parameter_name] = wrapper
        if wrappers and not hasattr(peft_layers, "_LoraFactorsProxy"):
            raise UserError(f"Adapters of experts need peft 0.21 where blocks are in pieces, not {peft.__version__}.")
        return ExpertAdapters(wrappers)

    def factors(self) -> dict[str, Factors]:
        """Return the factors of all experts, by parameter: views of what the adapters have now.

        Raises:
            UserError: if a parameter has several adapters.
        """
        return {name: _factors(wrapper) for name, wrapper in self.wrappers.items()}

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the wrappers only call what they are around while the context is open."""
        with ExitStack() as opened:
            for wrapper in self.wrappers.values():
                opened.enter_context(replaced_forward(wrapper, wrapper.base_layer.__call__))
            yield


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
    """Return the name of the adapter that one of peft's layers has.

    Raises:
        UserError: if there is no active adapter, or several.
    """
    active = [adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A]
    if len(active) != 1 or wrapper.disable_adapters or wrapper.merged:
        raise UserError(
            f"The parameter {wrapper.parameter_name} has the active adapters {active}: in pieces there must be one, "
            "neither disabled nor merged."
        )
    return str(active[0])


def _factors(wrapper: Any) -> Factors:
    """Return what ``ParamWrapper.get_delta_factors`` does, without its cast: that makes copies for all experts."""
    adapter, experts = only_adapter(wrapper), wrapper.num_experts
    first, second = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    left = second.reshape(second.shape[0], -1, experts).permute(2, 0, 1)
    right = first.reshape(experts, -1, first.shape[-1])
    if not wrapper._did_swap_in_out_features:
        left, right = right.transpose(-2, -1), left.transpose(-2, -1)
    return Factors(left, right, wrapper.scaling[adapter])


@contextmanager
def adapted_forward(wrapper: ParamWrapper) -> Iterator[None]:
    """Let a module with adapters of whole parameters compute with them while the context is open.

    Args:
        wrapper: the outermost of peft's modules around it.
    """
    module, wrappers = wrapper.get_base_layer(), []
    inner: nn.Module = wrapper
    while isinstance(inner, ParamWrapper):
        wrappers.append(inner)
        inner = inner.base_layer

    def forward(*args: Any, **kwargs: Any) -> Any:
        adapted = copy.copy(module)
        parameters = dict(module._parameters)
        for each in reversed(wrappers):
            delta = each.get_delta_weight(only_adapter(each))
            parameters[each.parameter_name] = _LoraParameterProxy(delta)(parameters[each.parameter_name])
        adapted.__dict__["_parameters"] = parameters
        return adapted(*args, **kwargs)

    with replaced_forward(wrapper, forward):
        yield


def adapted_modules(block: nn.Module, others: Collection[ParamWrapper]) -> list[ParamWrapper]:
    """Return the outermost wrappers of a block's modules that have adapters of whole parameters.

    Args:
        others: wrappers that are seen to elsewhere.

    Raises:
        UserError: if they adapt experts of a module that cannot compute them in ranges.
    """
    found = [
        (path, wrapper)
        for path, wrapper in block.named_modules()
        if isinstance(wrapper, ParamWrapper) and wrapper not in others
    ]
    for path, wrapper in found:
        if wrapper.num_experts > 1:
            raise UserError(
                f"{path} has an adapter of {wrapper.parameter_name}, the weights of all experts, which this model does "
                "not compute through transformers' interface for experts: it cannot be added in pieces. Adapt other "
                "modules (--lora-targets), or give the device more memory."
            )
    inner = {wrapper.base_layer for _, wrapper in found}
    return [wrapper for _, wrapper in found if wrapper not in inner]
