"""Counts the memory of tensors that a computation makes."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Bytes of all tensors made while this is active that still exist, and most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _has_memory(leaf)}
        for leaf in filter(_has_memory, tree_leaves(result)):
            storage = leaf.untyped_storage()
            where, nbytes = storage.data_ptr(), storage.nbytes()
            if nbytes and where not in given and where not in self._seen:
                self._seen.add(where)
                self.now += nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, where, nbytes)
        return result

    def _gone(self, where: int, nbytes: int) -> None:
        self._seen.discard(where)
        self.now -= nbytes


def _has_memory(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, torch.nn.Parameter)
