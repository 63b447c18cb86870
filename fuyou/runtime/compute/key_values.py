"""The cache that a model is given when it generates: transformers' own, over memory that was planned for it.

Each block's layer writes keys and values where they stay, and hands out views of them. A layer whose home is host
memory passes through one place on the device: fetched before the block computes, and what is new is stored after it.
"""

import math
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from common.errors import FinetuneError
from fuyou.layout.key_values import KeyValueCache, LayerKeyValues
from fuyou.runtime.data_plane.buffers import Buffers

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, ``[B, heads, tokens, width]``."""


class KeyValueLayer(DynamicLayer):
    """The keys and values of one block for one micro-batch.

    Args:
        place: memory on the device that they are written to.
        home: memory of the host that they stay in, if they do not stay on the device.
        window: as :class:`fuyou.layout.key_values.LayerKeyValues` has it.
    """

    def __init__(self, place: Pair, home: Pair | None, window: int | None):
        super().__init__()
        self._place, self._home, self._window = place, home, window
        self.is_sliding, self.is_initialized = window is not None, True
        self.dtype, self.device = place[0].dtype, place[0].device
        self.cumulative_length = 0
        self._stored = self._first_new = 0  # tokens that are there, and the first one that is not at home yet
        if window is not None:
            self.sliding_window = window

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Pair:
        """Keep the keys and values of new tokens; return those of all tokens that the new ones may attend to."""
        new, capacity = key_states.shape[-2], self._place[0].shape[-2]
        self.cumulative_length += new
        if self._stored + new > capacity:
            if self._window is None:
                raise FinetuneError(f"A block is given {self._stored + new} tokens where it has room for {capacity}.")
            if self._window - 1 + new > capacity:  # a prompt, as a rule: only its end is looked at again
                whole = self._joined(key_states, value_states)
                self._stored = 0
                self._write(*(part[..., part.shape[-2] - min(part.shape[-2], self._window - 1) :, :] for part in whole))
                return whole
            self._move_to_front(self._window - 1)
        self._write(key_states, value_states)
        visible = self._stored if self._window is None else min(self._stored, self._window - 1 + new)
        keys, values = (part[..., self._stored - visible : self._stored, :] for part in self._place)
        return keys, values

    def fetch(self) -> None:
        """Bring to the device what is in host memory."""
        if self._home is not None:
            for place, home in zip(self._place, self._home, strict=True):
                place[..., : self._stored, :].copy_(home[..., : self._stored, :], non_blocking=True)
            self._first_new = self._stored

    def store(self) -> None:
        """Bring to host memory what is new."""
        if self._home is not None:
            new = slice(self._first_new, self._stored)
            for place, home in zip(self._place, self._home, strict=True):
                home[..., new, :].copy_(place[..., new, :], non_blocking=True)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return for how many tokens a mask is wanted, and the number of the first of them."""
        seen = self.cumulative_length
        past = seen if self._window is None else min(seen, self._window - 1)
        return past + query_length, seen - past

    def get_seq_length(self) -> int:
        """Return how many tokens there have been."""
        return self.cumulative_length

    def _joined(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Pair:
        kept = min(self._stored, self.sliding_window - 1)
        old = (part[..., self._stored - kept : self._stored, :] for part in self._place)
        keys, values = (torch.cat(pair, -2) for pair in zip(old, (key_states, value_states), strict=True))
        return keys, values

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        stop = self._stored + keys.shape[-2]
        self._first_new = min(self._first_new, self._stored)
        for place, new in zip(self._place, (keys, values), strict=True):
            place[..., self._stored : stop, :].copy_(new)
        self._stored = stop

    def _move_to_front(self, count: int) -> None:
        for place in self._place:
            place[..., :count, :] = place[..., self._stored - count : self._stored, :].clone()
        self._stored, self._first_new = count, 0


class KeyValueMemory(DynamicCache):
    """The cache of one micro-batch.

    Args:
        config: the model's configuration.
        layers: one for each block.
    """

    def __init__(self, config: PreTrainedConfig, layers: list[KeyValueLayer]):
        super().__init__(config=config)
        self.layers = [*layers]
        self.blocks = layers
        """The same, by their own type."""


def open_caches(
    buffers: Buffers, config: PreTrainedConfig, sizes: KeyValueCache, micro_batches: list[int]
) -> list[KeyValueMemory]:
    """Return an empty cache for each micro-batch.

    Args:
        buffers: whose plan has room for them.
        config: the model's configuration.
        sizes: of these sequences.
        micro_batches: sequences of each micro-batch.
    """
    planned = buffers.plan.batch
    assert planned.cache is not None
    device = _Places(buffers.key_values.bytes(0, planned.cache.buffer_bytes(planned.micro_rows)), sizes)
    host = _Places(buffers.host_key_values.tensor(torch.uint8, 0, planned.cache.host_bytes), sizes)
    dtype = buffers.shape.precision.dtype
    caches: list[list[KeyValueLayer]] = [[] for _ in micro_batches]
    for one in sizes.layers[: sizes.device_layers]:
        for layers, rows in zip(caches, micro_batches, strict=True):
            layers.append(KeyValueLayer(device.take(one, rows, dtype), None, one.window))
    passing = device.used
    for one in sizes.layers[sizes.device_layers :]:
        for layers, rows in zip(caches, micro_batches, strict=True):
            device.used = passing
            place = device.take(one, rows, dtype)
            layers.append(KeyValueLayer(place, host.take(one, rows, dtype), one.window))
    return [KeyValueMemory(config, layers) for layers in caches]


class _Places:
    """Memory that is given away from its beginning."""

    def __init__(self, memory: torch.Tensor, sizes: KeyValueCache):
        self._memory, self._sizes = memory, sizes
        self.used = 0
        """Bytes that are given away."""

    def take(self, layer: LayerKeyValues, rows: int, dtype: torch.dtype) -> Pair:
        """Return room for ``rows`` sequences."""
        tokens, made = layer.capacity(self._sizes.tokens), []
        for heads, width in (layer.keys, layer.values):
            shape = (rows, heads, tokens, width)
            nbytes = math.prod(shape) * dtype.itemsize
            made.append(self._memory[self.used : self.used + nbytes].view(dtype).view(shape))
            self.used += nbytes
        return made[0], made[1]
