"""Rows that pass through blocks in chunks of tokens, with the keys and values of earlier chunks at hand.

A family's code asks a cache for them, as in generation; here, the cache is a buffer with the keys and values of one row
in one block. A forward pass takes the chunks in order, and each adds its own. A backward pass takes them in reverse:
gradients of the keys and values that a chunk has used are summed in fp32, until it is the turn of the chunk that has
made them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig

from fuyou.model.operators import makes_views


@dataclass(frozen=True)
class BlockKeys:
    """Shapes of what one block keeps of each token: its keys and its values."""

    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype

    @staticmethod
    def of(seen: list[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> "BlockKeys | None":
        """Return the shapes of what a block has added for ``tokens``; None if it is something else."""
        if len(seen) != 1:
            return None
        keys, values = seen[0]
        whole = all(part.dim() == 4 and part.shape[0] == 1 and part.shape[2] == tokens for part in (keys, values))
        if not whole or keys.dtype is not values.dtype:
            return None
        return BlockKeys((keys.shape[1], values.shape[1]), (keys.shape[3], values.shape[3]), keys.dtype)

    @property
    def elements(self) -> int:
        """Return the elements of one token."""
        return sum(heads * width for heads, width in zip(self.heads, self.widths, strict=True))

    @property
    def nbytes(self) -> int:
        """Return the bytes of one token."""
        return self.elements * self.dtype.itemsize

    def views(self, flat: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[1, heads, seq_len, width]`` in a flat buffer of any dtype."""
        sizes = [heads * width * seq_len for heads, width in zip(self.heads, self.widths, strict=True)]
        keys, values = flat[: sum(sizes)].split(sizes)
        return (
            keys.view(1, self.heads[0], seq_len, self.widths[0]),
            values.view(1, self.heads[1], seq_len, self.widths[1]),
        )


@dataclass(frozen=True)
class RowKeys:
    """Keys and values of one row in one block, and sums of their gradients (fp32) in a backward pass."""

    states: tuple[torch.Tensor, torch.Tensor]
    gradients: tuple[torch.Tensor, torch.Tensor] | None = None


class _Layers(list[Any]):
    """The kinds of a cache's layers, for masks: what else layers hold (states of convolutions, of linear attention, or
    of an index) is not carried from chunk to chunk."""

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("Rows in chunks, of a family that keeps more than keys and values.")


class ChunkCache(DynamicCache):
    """What a family's code takes for the cache of a row's earlier tokens.

    Args:
        config: of the model.
        start: first token of the chunk that is computed.
        length: tokens of the whole row.
    """

    def __init__(self, config: PreTrainedConfig, start: int, length: int):
        super().__init__(config=config)
        self._windows = [getattr(layer, "sliding_window", None) for layer in self.layers]
        self.layers = _Layers(self.layers)
        self.start, self.length = start, length
        self.row: RowKeys | None = None
        """Of the block that is running."""
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Keys and values that blocks have added without a row to add them to."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a chunk's keys and values to its row; return those that the chunk attends to."""
        if self.row is None:
            self.seen.append((key_states, value_states))
            return key_states, value_states
        first = self._first(layer_idx)
        gradients = self.row.gradients or (None, None)
        keys, values = (
            _Attended.apply(new, states, gradient, self.start, first)
            for new, states, gradient in zip((key_states, value_states), self.row.states, gradients, strict=True)
        )
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of earlier tokens."""
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many keys there are, and the position of the first."""
        first = self._first(layer_idx)
        return self.start + query_length - first, first

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no largest length."""
        return -1

    def window(self, layer_idx: int) -> int | None:
        """Return how many tokens a token of a layer sees; None: all."""
        return self._windows[layer_idx] if layer_idx < len(self._windows) else None

    def _first(self, layer_idx: int) -> int:
        window = self.window(layer_idx)
        return 0 if window is None else max(0, self.start - window + 1)


class _Attended(torch.autograd.Function):
    """Returns what a chunk attends to of its row, with its own part ``new``."""

    @staticmethod
    def forward(
        ctx: Any, new: torch.Tensor, states: torch.Tensor, gradient: torch.Tensor | None, start: int, first: int
    ) -> torch.Tensor:
        end = start + new.shape[-2]
        if gradient is None:  # in the backward pass they are there already
            states[..., start:end, :] = new
        ctx.places = gradient, start, first, end
        return states[..., first:end, :]

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums, start, first, end = ctx.places
        (given,) = upstream
        sums[..., first:end, :] += given
        return sums[..., start:end, :].to(given.dtype), None, None, None, None


AUTOGRAD_NODE = f"{_Attended.__name__}Backward"
"""Name of the node in graphs of autograd."""


class NoChoices(TorchDispatchMode):
    """Lets experts on the meta device find no tokens that have chosen them: they do not depend on earlier tokens."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        return func(*args, **(kwargs or {}))


class MadeBytes(TorchDispatchMode):
    """Sums up the bytes of the tensors that operators make while it is open."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not makes_views(func):
            self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result
