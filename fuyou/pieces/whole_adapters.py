"""Adapters of whole parameters that peft wraps as such (``ParamWrapper``): those of routers, in mixtures of experts.

Peft registers a parametrisation on the module while it runs, and caches its value for the process. Passes of several
micro-batches, which take turns in the middle of a module, would see each other's. So a module with such adapters runs
as a copy of itself here (of its attributes, not of its memory) that has the sums for parameters.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora.layer import ParamWrapper, _LoraParameterProxy
from torch import nn

from common.errors import UserError
from fuyou.pieces.expert_adapters import only_adapter, replaced_forward


class AdaptedModule:
    """A module with adapters of its own parameters.

    Args:
        wrapper: the outermost of peft's modules around it.
    """

    def __init__(self, wrapper: ParamWrapper):
        self._outermost = wrapper
        self._module: nn.Module = wrapper.get_base_layer()
        self._wrappers = []
        inner: Any = wrapper
        while isinstance(inner, ParamWrapper):
            self._wrappers.append(inner)
            inner = inner.base_layer

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the module compute with its adapters while the context is open."""
        with replaced_forward(self._outermost, self._forward):
            yield

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        adapted: Any = copy.copy(self._module)
        parameters = dict(self._module._parameters)
        for wrapper in reversed(self._wrappers):
            name = wrapper.parameter_name
            delta = wrapper.get_delta_weight(only_adapter(wrapper))
            parameters[name] = _LoraParameterProxy(delta)(parameters[name])
        adapted.__dict__["_parameters"] = parameters
        return adapted(*args, **kwargs)


def adapted_modules(block: nn.Module, others: Collection[ParamWrapper]) -> list[AdaptedModule]:
    """Return the modules of a block that have adapters of whole parameters.

    Args:
        block: the block.
        others: wrappers that are seen to elsewhere.

    Raises:
        UserError: they are of the experts of a module that cannot compute them in ranges.
    """
    wrappers = {path: one for path, one in block.named_modules() if isinstance(one, ParamWrapper) and one not in others}
    for path, wrapper in wrappers.items():
        if wrapper.num_experts > 1:
            raise UserError(
                f"{path} has an adapter of {wrapper.parameter_name}, the weights of all experts, which this model does "
                "not compute through transformers' interface for experts: it cannot be added in pieces. Adapt other "
                "modules (--lora-targets), or give the device more memory."
            )
    inner = {id(one.base_layer) for one in wrappers.values()}
    return [AdaptedModule(one) for one in wrappers.values() if id(one) not in inner]
