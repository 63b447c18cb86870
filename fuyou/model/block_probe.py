"""Runs blocks without their weights, to see what they return and what they leave for each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from fuyou.model.block_calls import BlockCalls, Key, shared_dictionaries


class BlockProbe:
    """Runs blocks on the meta device while a model is surveyed.

    Args:
        returns: by type of block, what blocks are known to return: the structure, and the leaves (``TENSOR`` in the
            place of each tensor). Types that are missing are added.
        everything: run every block, to learn the sizes of what they produce; else one of each type.
    """

    def __init__(self, returns: dict[type[nn.Module], tuple[TreeSpec, list[Any]]], everything: bool = False):
        self.returns, self._everything = returns, everything
        #: What blocks returned beside hidden states, on the meta device.
        self.values: dict[Key, torch.Tensor] = {}
        #: What they left in dictionaries that they share.
        self.left: list[torch.Tensor] = []
        #: Of the hidden states that they returned.
        self.dtypes: set[torch.dtype] = set()

    def look(self, index: int, block: nn.Module, hidden: torch.Tensor, calls: BlockCalls) -> None:
        """Run ``block`` with what it has just been called with, if there is anything to learn from that."""
        args, kwargs = calls.arguments[index]
        shared = shared_dictionaries(args, kwargs)
        if not (self._everything or shared) and type(block) in self.returns:
            return

        def to_meta(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            key = calls.key_of(leaf)
            return self.values[key] if key in self.values else leaf.to("meta")

        def to_device(leaf: Any) -> Any:
            key = calls.key_of(leaf) if isinstance(leaf, torch.Tensor) else None
            return torch.zeros_like(self.values[key], device=hidden.device) if key in self.values else leaf

        before = [dict(dictionary) for dictionary in shared]
        identities = {id(dictionary) for dictionary in shared}
        args, kwargs = tree_map(to_meta, (args, kwargs), is_leaf=lambda leaf: id(leaf) in identities)
        try:
            with on_meta(block), torch.no_grad(), _GroupedShapes():
                result = block(torch.empty_like(hidden, device="meta"), *args, **kwargs)
        except Exception:  # whatever a family's own code does without values, or with tensors of its own
            result = _on_device(block, hidden, *tree_map(to_device, calls.arguments[index]))
        leaves, structure = tree_flatten(result)
        self.dtypes.add(leaves[0].dtype)
        for position, leaf in enumerate(leaves):
            if position and isinstance(leaf, torch.Tensor):
                self.values[index, position] = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        self.returns.setdefault(type(block), (structure, [_without_values(leaf) for leaf in leaves]))
        for dictionary, known in zip(shared, before, strict=True):
            for name, entry in dictionary.items():
                if name not in known or known[name] is not entry:
                    self.left += [leaf for leaf in tree_leaves(entry) if isinstance(leaf, torch.Tensor)]


class _GroupedShapes(TorchDispatchMode):
    """Makes products of groups of rows without computing: their kernel insists on bf16, or on weights with memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_grouped_product(func, args):
            return args[0].new_zeros(args[0].shape[0], args[1].shape[2])
        return func(*args, **(kwargs or {}))


def is_grouped_product(function: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a call multiplies groups of rows ``[N, I]`` by a matrix each, ``[E, I, O]``, and gives ``[N, O]``."""
    return function is torch.ops.aten._grouped_mm.default and args[1].dim() == 3


def _on_device(block: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block on the device, with weights that are all zero and take no memory."""
    with torch.no_grad(), _GroupedShapes(), unchanged(block):
        for module in block.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = empty_parameter(parameter, hidden.device)
        return block(torch.zeros_like(hidden), *args, **kwargs)


def empty_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return zeros in the place of ``parameter`` that take no memory."""
    zero = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    return nn.Parameter(zero, requires_grad=parameter.requires_grad)


@contextmanager
def on_meta(block: nn.Module) -> Iterator[None]:
    """Let ``block`` run on the meta device: its buffers go there, and whatever the run leaves in it is undone."""
    with unchanged(block):
        for module in block.modules():
            module._buffers.update({name: _to_meta(buffer) for name, buffer in module._buffers.items()})
        yield


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Undo, when the context ends, whatever a run has left in the modules."""
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


def _to_meta(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.to("meta")


def _without_values(leaf: Any) -> Any:
    """A mark in the place of a tensor, and whatever else a block returns as it is."""
    return TENSOR if isinstance(leaf, torch.Tensor) else leaf


#: Stands for a tensor among the leaves of what a block returns.
TENSOR = object()
