"""What links the blocks of a model to each other and to the embedding, beside the hidden states."""

from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_flatten_with_path

Key = tuple[int, Hashable]
"""Name of a value: the block that made it (or :data:`EMBEDDING`), and which of that block's values it is."""
EMBEDDING = -1


@dataclass(frozen=True)
class BlockLinks:
    """The links between the blocks of a model, which are the same for all batches."""

    carried: frozenset[tuple[int, str]] = frozenset()
    """Arguments that carry gradients back to the embedding: block, and path in its arguments."""
    consumed: frozenset[Key] = frozenset()
    """Tensors that blocks return beside hidden states and that other blocks are given."""
    shared: bool = False
    """Whether blocks are given one dictionary, in which they leave values for each other."""

    def __bool__(self) -> bool:
        return bool(self.carried or self.consumed or self.shared)


def shared_dictionaries(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[MutableMapping[Any, Any]]:
    """Return the dictionaries among a block's arguments."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)]


def argument_paths(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all leaves of a block's arguments, with their paths."""
    for path, leaf in tree_flatten_with_path((args, dict(kwargs)))[0]:
        yield "".join(str(part) for part in path), leaf
