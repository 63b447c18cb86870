"""Counts the bytes of tensors that a computation makes, on the meta device as well."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors made while this is active that still exist, and most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        for leaf in filter(_has_storage, tree_leaves(result)):
            storage = leaf.untyped_storage()
            identity, nbytes = storage._cdata, storage.nbytes()
            if nbytes and identity not in given and identity not in self._seen:
                self._seen.add(identity)
                self.now += nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, identity, nbytes)
        return result

    def _gone(self, identity: int, nbytes: int) -> None:
        self._seen.discard(identity)
        self.now -= nbytes


def _has_storage(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, torch.nn.Parameter)
