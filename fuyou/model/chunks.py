"""Rows that pass through blocks in chunks of tokens, with the keys and values of earlier chunks at hand.

A family's code asks a cache for them, as in generation; here, the cache is a buffer with the keys and values of one row
in one block, of each of its attentions, the keys of their indices (DeepSeek's sparse attention), and the states that
each chunk leaves for the next (convolutions, linear attention, Mamba). A forward pass takes the chunks in order, and
each adds its part. A backward pass takes them in reverse: gradients of the keys and values that a chunk has used are
summed in fp32, until it is the turn of the chunk that has made them; gradients of states pass to the chunk before.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig

from fuyou.model.operators import makes_views

State = tuple[str, int, int]
"""What a state is known by: its kind, its layer, and its number there."""
_ALIGNMENT = 16  # Bytes at which states of any dtype may begin


@dataclass(frozen=True)
class BlockKeys:
    """Shapes of what one block keeps of a row: of each token, its keys and its values, in the order in which it adds
    them, and of each chunk the states that it leaves for the next one."""

    # Of each part, for one token: the dimension before the last counts tokens
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    states: tuple[tuple[State, tuple[int, ...], torch.dtype], ...] = ()

    @staticmethod
    def of(cache: "ChunkCache", tokens: int, dtype: torch.dtype) -> "BlockKeys | None":
        """Return the shapes of what a block has added for ``tokens``; None if it is something else."""
        seen = cache.seen
        whole = all(part.dim() > 2 and part.shape[0] == 1 and part.shape[-2] == tokens for part in seen)
        dtypes = {part.dtype for part in seen} or {dtype}
        if not whole or len(dtypes) > 1:
            return None
        states = tuple((name, tuple(value.shape), value.dtype) for name, value in cache.left.items())
        return BlockKeys(tuple((*part.shape[:-2], 1, part.shape[-1]) for part in seen), dtypes.pop(), states)

    @property
    def elements(self) -> int:
        """Elements of one token."""
        return sum(map(math.prod, self.shapes))

    @property
    def nbytes(self) -> int:
        """Return the bytes of one token."""
        return self.elements * self.dtype.itemsize

    @property
    def state_elements(self) -> int:
        """Return the elements of the states that a chunk leaves."""
        return sum(math.prod(shape) for _, shape, _ in self.states)

    @property
    def state_nbytes(self) -> int:
        """Return the bytes that these take."""
        return (
            sum(-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) for _, shape, dtype in self.states)
            * _ALIGNMENT
        )

    def row(
        self, flat: torch.Tensor, sums: torch.Tensor | None, start: int, length: int, chunk: int
    ) -> "RowKeys":
        """Return a row of ``length`` tokens as the chunk finds it whose first token is ``start``.

        Args:
            flat: bytes of what the block keeps of the row.
            sums: fp32 gradients of its tokens and of one chunk's states, in a backward pass.
            chunk: tokens of all chunks but the last, and the one before if the last would have but one.
        """
        number = -(-start // chunk)
        last = (length - 1) // chunk
        bounds = [
            self.row_nbytes(length, length) + self.state_nbytes * (number + offset) for offset in (-1, 0)
        ]
        gradients = None
        passed = None
        if sums is not None:
            elements = self.elements * length
            gradients = self._views(sums[:elements], length)
            passed = {}
            for name, shape, _ in self.states:
                passed[name] = sums[elements : elements + math.prod(shape)].view(shape)
                elements += math.prod(shape)
        return RowKeys(
            self._views(flat[: self.nbytes * length].view(self.dtype), length),
            gradients,
            self._states(flat[bounds[0] :]) if number else {},
            self._states(flat[bounds[1] :]) if number < last else {},
            passed,
        )

    def row_nbytes(self, length: int, chunk: int) -> int:
        """Return the bytes of what the block keeps of a row of ``length`` tokens."""
        return -(-self.nbytes * length // _ALIGNMENT) * _ALIGNMENT + self.state_nbytes * (
            (length - 1) // chunk
        )

    def _views(self, flat: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
        sizes = [math.prod(shape) * length for shape in self.shapes]
        parts = zip(flat.split(sizes), self.shapes, strict=True)
        return tuple(part.view(*shape[:-2], length, shape[-1]) for part, shape in parts)

    def _states(self, flat: torch.Tensor) -> dict[State, torch.Tensor]:
        views = {}
        for name, shape, dtype in self.states:
            nbytes = math.prod(shape) * dtype.itemsize
            views[name] = flat[:nbytes].view(dtype).view(shape)
            flat = flat[-(-nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return views


@dataclass(frozen=True)
class RowKeys:
    """What one block keeps of one row, for one of its chunks."""

    parts: tuple[torch.Tensor, ...]  # Keys and values of the whole row
    gradients: tuple[torch.Tensor, ...] | None  # Sums of their gradients, in a backward pass
    earlier: dict[State, torch.Tensor]  # States that the chunk before has left
    later: dict[State, torch.Tensor]  # States that this chunk leaves
    # Gradients of these, then of the earlier ones, in a backward pass
    passed: dict[State, torch.Tensor] | None


class _Layers(list[Any]):
    """The kinds of a cache's layers, for masks: what else layers hold is not carried from chunk to chunk."""

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("Rows in chunks, of a family that keeps more than keys and values.")


class ChunkCache(DynamicCache):
    """What a family's code takes for the cache of a row's earlier tokens.

    Args:
        config: of the model.
        start: first token of the chunk that is computed.
        length: tokens of the whole row.
        bounds: first tokens of the documents that the chunk touches, and the end of the last; none if the row is one.
    """

    def __init__(self, config: PreTrainedConfig, start: int, length: int, *bounds: int):
        super().__init__(config=config)
        self._windows = [getattr(layer, "sliding_window", None) for layer in self.layers]
        self.layers = _Layers(self.layers)
        self.start = start
        self.length = length
        self.bounds = bounds or (0, length)
        self.row: RowKeys | None = None  # Of the block that is running
        # Keys and values that the block has added without a row to add them to
        self.seen: list[torch.Tensor] = []
        self.on_seen: Callable[[], None] = lambda: None  # Called after each of them
        self.left: dict[State, torch.Tensor] = {}  # States that it has left for the next chunk
        self._taken: dict[State, torch.Tensor] = {}  # States of the chunk before that it has taken
        self._added = 0  # How many parts of the row it has added to

    def begin(self) -> None:
        """Begin a call of a block."""
        self._added = 0
        for held in (self.seen, self.left, self._taken):
            held.clear()

    def document_lengths(self, tokens: int) -> torch.Tensor:
        """Return the length of the document of each of the chunk's ``tokens``, int64 ``[1, tokens]``."""
        bounds = torch.tensor(self.bounds)
        documents = torch.bucketize(torch.arange(self.start, self.start + tokens), bounds, right=True) - 1
        return bounds.diff()[documents][None]

    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the states that the latest call has left and that carry gradients, and these gradients."""
        if self.row is None or self.row.passed is None:
            return []
        passed = self.row.passed
        return [
            (state, passed[name].to(state.dtype)) for name, state in self.left.items() if state.requires_grad
        ]

    def pass_on(self) -> None:
        """Leave the gradients of states, after a backward pass, to the chunk before."""
        if self.row is not None and self.row.passed is not None:
            for name, gradient in self.row.passed.items():
                state = self._taken.get(name)
                if state is None or state.grad is None:
                    gradient.zero_()
                else:
                    gradient.copy_(state.grad)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a chunk's keys and values to its row; return those that the chunk attends to."""
        first = self._first(layer_idx)
        return self._add(key_states, first), self._add(value_states, first)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int, *args: Any) -> torch.Tensor:
        """Add the keys of an index; return those of all tokens seen so far."""
        return self._add(indexer_key_states, 0)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there is a chunk before this one."""
        return self.start > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True: then, one token takes the same way as several, which carries gradients."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs of a convolution in the chunk before; None if there is none."""
        return self._take(("convolution", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Leave the last inputs of a convolution for the next chunk; return them behind those of the chunk before."""
        before = self.get_conv_state(layer_idx, state_idx)
        joined = conv_states if before is None else torch.cat([before, conv_states], -1)
        size = conv_kernel_size or joined.shape[-1]
        last = functional.pad(joined, (max(0, size - joined.shape[-1]), 0))[..., -size:]
        self._leave(("convolution", layer_idx, state_idx), last)
        return joined

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state that the chunk before has ended with; None if there is none."""
        return self._take(("recurrent", layer_idx, state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Leave a state for the next chunk."""
        self._leave(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def _take(self, name: State) -> torch.Tensor | None:
        if self.row is None or name not in self.row.earlier:
            return None
        if name not in self._taken:
            state = self.row.earlier[name].detach()
            self._taken[name] = state.requires_grad_() if torch.is_grad_enabled() else state
        return self._taken[name]

    def _leave(self, name: State, state: torch.Tensor) -> None:
        if self.row is None or name in self.row.later:
            self.left[name] = state
        if self.row is not None and name in self.row.later and self.row.passed is None:
            self.row.later[name].copy_(state)

    def _add(self, new: torch.Tensor, first: int) -> torch.Tensor:
        if self.row is None:
            self.seen.append(new)
            self.on_seen()
            return new.new_zeros(*new.shape[:-2], self.start + new.shape[-2] - first, new.shape[-1])
        part = self._added
        gradients = self.row.gradients
        self._added += 1
        attended: torch.Tensor = _Attended.apply(
            new, self.row.parts[part], None if gradients is None else gradients[part], self.start, first
        )
        return attended

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
        ctx: Any,
        new: torch.Tensor,
        states: torch.Tensor,
        gradient: torch.Tensor | None,
        start: int,
        first: int,
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
