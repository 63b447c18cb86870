"""Running blocks without their weights, to learn what they return and what they leave for each other."""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only

from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.blocks.hidden_edits import Key, shared_dictionary
from fuyou.model.blocks.looped import leave_out_loops
from fuyou.model.blocks.weightless import empty_parameters, on_meta, replaced_parameters, restored

TENSOR = object()  # Stands for a tensor among the leaves of what a block returns


class BlockProbe:
    """Runs blocks on the meta device, and records the structure, shapes and dtypes of what they return.

    Args:
        returns: for each type of block, what it is known to return: the structure, and the leaves (:data:`TENSOR`
            instead of each tensor). Types that are missing are added.
        all_blocks: run every block, to learn the sizes of what they produce; otherwise one block of each type.
    """

    def __init__(self, returns: dict[type[nn.Module], tuple[TreeSpec, list[Any]]], all_blocks: bool):
        self.returns = returns
        self._all_blocks = all_blocks
        # Meta tensors that blocks have returned next to hidden states
        self.values: dict[Key, torch.Tensor] = {}
        self.left: list[torch.Tensor] = []  # Tensors that blocks have left in shared dictionaries
        self.dtypes: set[torch.dtype] = set()  # Dtypes of the hidden states that blocks have returned

    def run(self, index: int, block: nn.Module, hidden: torch.Tensor, calls: BlockCalls) -> None:
        """Run ``block`` with what it has just been called with, if there is anything to learn from that."""
        args, kwargs = calls.arguments[index]
        shared = shared_dictionary(args, kwargs)
        if not self._all_blocks and shared is None and type(block) in self.returns:
            return

        def to_meta(leaf: torch.Tensor) -> torch.Tensor:
            key = calls.key_of(leaf)
            return self.values[key] if key in self.values else leaf.to("meta")

        def to_device(leaf: torch.Tensor) -> torch.Tensor:
            key = calls.key_of(leaf)
            return torch.zeros_like(self.values[key], device=hidden.device) if key in self.values else leaf

        before = dict(shared or {})
        args, kwargs = tree_map_only(
            torch.Tensor, to_meta, (args, kwargs), is_leaf=lambda leaf: leaf is shared
        )
        try:
            with _entries_on_meta(shared), on_meta(block), torch.no_grad(), GroupedShapes():
                leave_out_loops(block)
                result = block(torch.empty_like(hidden, device="meta"), *args, **kwargs)
        except Exception:  # a family's code may fail in any way without values, or with its own tensors
            result = _on_device(
                block, hidden, *tree_map_only(torch.Tensor, to_device, calls.arguments[index])
            )
        leaves, structure = tree_flatten(result)
        self.dtypes.add(leaves[0].dtype)
        for position, leaf in enumerate(leaves):
            if position and isinstance(leaf, torch.Tensor):
                self.values[index, position] = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        self.returns.setdefault(
            type(block), (structure, [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        )
        for name, entry in (shared or {}).items():
            if name not in before or before[name] is not entry:
                self.left += [leaf for leaf in tree_leaves(entry) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _entries_on_meta(shared: MutableMapping[Any, Any] | None) -> Iterator[None]:
    """Put what a shared dictionary holds on the meta device while a block runs; what the block leaves there stays."""
    if shared is None:
        yield
        return
    before = dict(shared)
    without_values = tree_map_only(torch.Tensor, lambda value: value.to("meta"), before)
    shared.update(without_values)
    try:
        yield
    finally:
        untouched = [name for name, entry in without_values.items() if shared.get(name) is entry]
        shared.update({name: before[name] for name in untouched})


class GroupedShapes(TorchDispatchMode):
    """Replaces grouped matrix products by zeros: their kernel insists on bf16, or on weights with memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_grouped_product(func, args):
            return args[0].new_zeros(args[0].shape[0], args[1].shape[2])
        return func(*args, **(kwargs or {}))


def is_grouped_product(function: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether a call multiplies groups of rows ``[N, I]`` by one matrix each, of ``[E, I, O]``."""
    return function is torch.ops.aten._grouped_mm.default and args[1].dim() == 3


def _on_device(block: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    places = [(module, name) for module in block.modules() for name in module._parameters]
    empty = empty_parameters(places, hidden.device)
    with torch.no_grad(), GroupedShapes(), restored(block), replaced_parameters(empty):
        return block(torch.zeros_like(hidden), *args, **kwargs)


class UsedTensors(TorchFunctionMode):
    """Records which of some tensors PyTorch's functions are called with.

    In a run up to the blocks, these are the parameters that the model reads itself, rather than by calling the module
    that owns them.
    """

    def __init__(self, wanted: Iterable[int]):
        super().__init__()
        self._wanted = frozenset(wanted)
        self.found: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= self._wanted & {id(leaf) for leaf in tree_leaves((args, kwargs))}
        return func(*args, **(kwargs or {}))
