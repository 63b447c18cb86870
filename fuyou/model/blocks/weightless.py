"""Running modules without their weights: on the meta device, or with parameters that take no memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

ParameterPlace = tuple[nn.Module, str]  # A module, and the name that one of its parameters has in it


def empty_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return zeros that stand for ``parameter`` on ``device`` and take no memory."""
    zero = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    return nn.Parameter(zero, requires_grad=parameter.requires_grad)


def empty_parameters(places: Iterable[ParameterPlace], device: torch.device) -> dict[ParameterPlace, nn.Parameter]:
    """Return :func:`empty_parameter` for the parameters at ``places``."""
    found = {(owner, name): owner._parameters[name] for owner, name in places}
    return {place: empty_parameter(value, device) for place, value in found.items() if value is not None}


@contextmanager
def replaced_parameters(parameters: Mapping[ParameterPlace, nn.Parameter]) -> Iterator[None]:
    """Let modules have other parameters while the context is open."""
    saved = {(owner, name): owner._parameters[name] for owner, name in parameters}
    try:
        for (owner, name), parameter in parameters.items():
            owner._parameters[name] = parameter
        yield
    finally:
        for (owner, name), before in saved.items():
            owner._parameters[name] = before


@contextmanager
def skipped_modules(
    modules: Iterable[nn.Module], parameters: Mapping[ParameterPlace, nn.Parameter], device: torch.device
) -> Iterator[None]:
    """Let modules run on the meta device and return zeros while the context is open.

    With gradients enabled, the zeros require gradients exactly if the module's results would.

    Args:
        modules: those that are skipped.
        parameters: all meta parameters of the model.
        device: where the zeros are.
    """
    skipped = list(modules)
    for module in skipped:
        module.forward = _skipping_forward(module, parameters, device)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in skipped:
            del module.forward


def _skipping_forward(
    module: nn.Module, parameters: Mapping[ParameterPlace, nn.Parameter], device: torch.device
) -> Callable[..., Any]:
    forward = module.forward
    inner = set(module.modules())
    meta = {place: value for place, value in parameters.items() if place[0] in inner}
    trained = any(value.requires_grad for value in meta.values())

    def to_device(value: Any, carries: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        zeros = torch.zeros(value.shape, dtype=value.dtype, device=device)
        return zeros.requires_grad_().clone() if carries and value.is_floating_point() else zeros

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), replaced_parameters(meta), _buffers_on_meta(inner):
            result = forward(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        carries = torch.is_grad_enabled() and (trained or any(leaf.requires_grad for leaf in given))
        return tree_map(lambda value: to_device(value, carries), result)

    return run


@contextmanager
def _buffers_on_meta(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules have their buffers on the meta device: scalars of a GPU, unlike a CPU's, do not mix with what is."""
    saved = [(module, dict(module._buffers)) for module in modules if module._buffers]
    try:
        for module, buffers in saved:
            module._buffers.update({name: _to_meta(buffer) for name, buffer in buffers.items()})
        yield
    finally:
        for module, buffers in saved:
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def on_meta(block: nn.Module) -> Iterator[None]:
    """Let ``block`` run on the meta device: its buffers go there, and all that the run leaves in it is undone."""
    with restored(block):
        for module in block.modules():
            module._buffers.update({name: _to_meta(buffer) for name, buffer in module._buffers.items()})
        with _autocast_on_meta():
            yield


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """Let ``torch.autocast`` do nothing on the meta device, which it does not know (peft asks it for fused experts)."""
    known = torch.autocast

    def chosen(device_type: str, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return nullcontext() if device_type == "meta" else known(device_type, *args, **kwargs)

    torch.autocast = chosen  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.autocast = known  # type: ignore[misc]


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Undo, when the context ends, all that a run has left in a module and its submodules."""
    saved = [(one, dict(one.__dict__), dict(one._buffers), dict(one._parameters)) for one in module.modules()]
    try:
        yield
    finally:
        for one, attributes, buffers, parameters in saved:
            one.__dict__.clear()
            one.__dict__.update(attributes)
            one._buffers.clear()
            one._buffers.update(buffers)
            one._parameters.update(parameters)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def runners_of(model: nn.Module, owners: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return, for each of ``owners`` of parameters, the module that is called to use them.

    That is the owner itself; for a mere collection of parameters, it is the module that holds the collection, and for a
    module that peft trains next to the original, the wrapper of both. These then run all that they contain.
    """
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    holders = {parents[owner] for owner in owners if isinstance(owner, nn.ParameterDict | nn.ParameterList)}
    holders |= {module for module in parents if isinstance(module, AuxiliaryTrainingWrapper)}
    found = {}
    for owner in owners:
        found[owner] = module = owner
        while module in parents:
            module = parents[module]
            if module in holders:
                found[owner] = module
    return found
