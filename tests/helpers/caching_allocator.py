"""What PyTorch's allocator for CUDA would reserve for what a computation makes on the meta device.

Its rules for one stream (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded up, small and large blocks come from
separate segments, the smallest block that fits is taken and split if much of it is left, and neighbors that are free
are joined. No segment is given back.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 1 << 20


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    nbytes: int
    small: bool
    free: bool = True
    before: "Block | None" = None
    behind: "Block | None" = None


class CachingAllocator:
    """The segments and their blocks."""

    def __init__(self) -> None:
        self.reserved = self.asked = self.most_asked = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}

    def take(self, nbytes: int) -> Block:
        """Allocate."""
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        fitting = [block for block in self._free[small] if block.nbytes >= size]
        if fitting:
            block = min(fitting, key=lambda one: one.nbytes)
            self._free[small].remove(block)
        else:
            large = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            block = Block(2 * MIB if small else large, small)
            self.reserved += block.nbytes
        left = block.nbytes - size
        if left >= 512 if small else left > MIB:
            rest = Block(left, small, True, block, block.behind)
            if block.behind is not None:
                block.behind.before = rest
            block.behind, block.nbytes = rest, size
            self._free[small].append(rest)
        block.free = False
        self.asked += nbytes
        self.most_asked = max(self.most_asked, self.asked)
        return block

    def give_back(self, block: Block, nbytes: int) -> None:
        """Free."""
        self.asked -= nbytes
        block.free, pool = True, self._free[block.small]
        for other in (block.before, block.behind):
            if other is not None and other.free:
                pool.remove(other)
                block.nbytes += other.nbytes
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.behind = block
                else:
                    block.behind = other.behind
                    if other.behind is not None:
                        other.behind.before = block
        pool.append(block)


class Allocating(TorchDispatchMode):
    """Has an allocator take and free what operators make."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self._allocator = allocator
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in filter(_is_meta, tree_leaves(result)):
            storage = leaf.untyped_storage()
            identity, nbytes = storage._cdata, storage.nbytes()
            if nbytes and identity not in given and identity not in self._seen:
                self._seen.add(identity)
                weakref.finalize(storage, self._gone, identity, self._allocator.take(nbytes), nbytes)
        return result

    def _gone(self, identity: int, block: Block, nbytes: int) -> None:
        self._seen.discard(identity)
        self._allocator.give_back(block, nbytes)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta
