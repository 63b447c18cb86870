"""Running modules without their weights: on the meta device, or with parameters that take no memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

ParameterPlace = tuple[nn.Module, str]  # A module, and the name that one of its parameters has in it


def empty_parameters(
    places: Iterable[ParameterPlace], device: torch.device
) -> dict[ParameterPlace, nn.Parameter]:
    """Return zeros on ``device`` that stand for the parameters at ``places`` and take no memory."""
    empty = {}
    for owner, name in places:
        parameter = owner._parameters[name]
        if parameter is not None:
            zero = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            empty[owner, name] = nn.Parameter(zero, requires_grad=parameter.requires_grad)
    return empty


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

    With gradients enabled, the zeros require gradients exactly if the module's results would. ``parameters`` are all
    meta parameters of the model.
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
    meta = {key: value for key, value in parameters.items() if key[0] in inner}
    trained = any(value.requires_grad for value in meta.values())

    def to_device(value: torch.Tensor, carries: bool) -> torch.Tensor:
        zeros = torch.zeros(value.shape, dtype=value.dtype, device=device)
        return zeros.requires_grad_().clone() if carries and value.is_floating_point() else zeros

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), replaced_parameters(meta), on_meta(module):
            result = forward(*_to_meta(args), **_to_meta(kwargs))
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        carries = torch.is_grad_enabled() and (trained or any(leaf.requires_grad for leaf in given))
        return tree_map_only(torch.Tensor, lambda value: to_device(value, carries), result)

    return run


@contextmanager
def on_meta(block: nn.Module) -> Iterator[None]:
    """Let ``block`` run on the meta device: its buffers go there, and all that the run leaves in it is undone."""
    autocast = torch.autocast

    def autocast_elsewhere(device_type: str, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    with restored(block):
        for module in block.modules():
            module._buffers.update(_to_meta(module._buffers))
        # It does not know the meta device, and peft asks it for fused experts.
        torch.autocast = autocast_elsewhere  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            torch.autocast = autocast  # type: ignore[misc]


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Undo, when the context ends, all that a run has left in a module and its submodules."""
    saved = [
        (child, dict(child.__dict__), dict(child._buffers), dict(child._parameters))
        for child in module.modules()
    ]
    try:
        yield
    finally:
        for child, attributes, buffers, parameters in saved:
            child.__dict__.clear()
            child.__dict__.update(attributes)
            child._buffers.clear()
            child._buffers.update(buffers)
            child._parameters.update(parameters)


def _to_meta(values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda value: value.to("meta"), values)


def runners_of(model: nn.Module, owners: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return, for each of ``owners`` of parameters, the module that is called to use them.

    That is the owner itself; for a mere collection of parameters, it is the module that holds the collection, and for a
    module that peft trains next to the original, the wrapper of both. These then run all that they contain.
    """
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    holders = {parents[owner] for owner in owners if isinstance(owner, nn.ParameterDict | nn.ParameterList)}
    holders |= {module for module in parents if isinstance(module, AuxiliaryTrainingWrapper)}
    runners = {}
    for owner in owners:
        runners[owner] = module = owner
        while module in parents:
            module = parents[module]
            if module in holders:
                runners[owner] = module
    return runners
