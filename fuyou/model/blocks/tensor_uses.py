"""Modes that record which tensors a model uses, while it is run without weights to find out how it can be split."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class UsedTensors(TorchFunctionMode):
    """Records which of some tensors PyTorch's functions are called with.

    In a run up to the blocks, these are the parameters that the model reads itself, rather than by calling the module
    that owns them.

    Args:
        wanted: identities of the tensors.
    """

    def __init__(self, wanted: Iterable[int]):
        super().__init__()
        self._wanted = frozenset(wanted)
        self.found: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._wanted:
            self.found |= self._wanted & {id(leaf) for leaf in tree_leaves((args, kwargs))}
        return func(*args, **(kwargs or {}))


class EarlierValueUses(TorchFunctionMode):
    """Records whether a model uses, after its last block, values that were computed before the end of the blocks.

    Such a model cannot be split: its head would need more than the output of the last block.
    """

    _SHAPE_ONLY = frozenset(
        {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"}
    )
    """Functions that read the shape of their argument, and none of its values."""

    def __init__(self) -> None:
        super().__init__()
        self._earlier: dict[int, torch.Tensor] = {}
        self._after = False
        self.found = False

    def add(self, made: Any) -> None:
        """Count the tensors in ``made`` among the earlier values, unless the last block has been called."""
        if not self._after:
            self._earlier.update({id(leaf): leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)})

    def call_block(self, hidden: torch.Tensor, last: bool) -> torch.Tensor:
        """Note that a block is called on ``hidden``, and return what stands for its output."""
        self._after = last
        output = torch.empty_like(hidden)
        self.add(output)
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = any(id(leaf) in self._earlier for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if used and getattr(func, "__name__", "") not in self._SHAPE_ONLY:
            makes = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
            self.found |= self._after and makes
            self.add(result)
        return result
