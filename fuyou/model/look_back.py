"""What is watched while a model is run without weights, to find out how it can be split at its blocks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class UsedTensors(TorchFunctionMode):
    """Finds out which of some tensors PyTorch's functions are called with.

    Args:
        wanted: their identities.
    """

    def __init__(self, wanted: Iterable[int]):
        super().__init__()
        self._wanted = frozenset(wanted)
        self.found: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._wanted:
            self.found |= self._wanted & {id(leaf) for leaf in tree_leaves((args, kwargs))}
        return func(*args, **(kwargs or {}))


class LookBack(TorchFunctionMode):
    """Finds out whether values from before the end of the blocks are used after it, in a run of the head."""

    #: What reads the shape of its argument and nothing of its values.
    _SHAPE_ONLY = frozenset(
        {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"}
    )

    def __init__(self) -> None:
        super().__init__()
        self._earlier: dict[int, torch.Tensor] = {}
        self._after = False
        self.found = False

    def note(self, made: Any) -> None:
        """Remember tensors from before the end."""
        if not self._after:
            self._earlier.update({id(leaf): leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)})

    def reach(self, hidden: torch.Tensor, last: bool) -> torch.Tensor:
        """A block is called; returns what stands for its output."""
        self._after = last
        output = torch.empty_like(hidden)
        self.note(output)
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = any(id(leaf) in self._earlier for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if used and getattr(func, "__name__", "") not in self._SHAPE_ONLY:
            makes = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
            self.found |= self._after and makes
            self.note(result)
        return result
