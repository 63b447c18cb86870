"""Keys and values that generation keeps of every block, and how many bytes they take on the device and the host."""

import math
from dataclasses import dataclass, replace

SLACK = 64
"""Tokens beyond its window that a sliding block has room for, so that it rarely has to move what it keeps."""


@dataclass(frozen=True)
class LayerKeyValues:
    """The keys and values that one block keeps of each token."""

    keys: tuple[int, int]
    """Heads, and elements of each."""
    values: tuple[int, int]
    """The same of values."""
    window: int | None = None
    """Tokens that are attended to, the newest included; None: all of them."""

    @property
    def elements(self) -> int:
        """Elements of a token."""
        return math.prod(self.keys) + math.prod(self.values)

    def capacity(self, tokens: int) -> int:
        """Return how many tokens it has room for, of sequences that grow to ``tokens``."""
        return tokens if self.window is None else min(tokens, self.window - 1 + SLACK)


@dataclass(frozen=True)
class KeyValueCache:
    """What all blocks keep of sequences that are generated, and on which tier: each block on one of them."""

    layers: tuple[LayerKeyValues, ...]
    itemsize: int
    """Bytes of an element."""
    rows: int
    """Sequences."""
    tokens: int
    """Tokens that each sequence grows to."""
    device_layers: int
    """Blocks, from the first on, whose keys and values stay on the device; those of all others stay in host memory."""

    def layer_bytes(self, layer: int, rows: int) -> int:
        """Return the bytes of so many sequences in one block."""
        one = self.layers[layer]
        return rows * one.capacity(self.tokens) * one.elements * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(self.layer_bytes(layer, self.rows) for layer in range(len(self.layers)))

    def device_bytes(self, micro_rows: int) -> int:
        """Return the bytes on the device: of the blocks that stay there, of one micro-batch of any other while it
        computes, and of a sliding block's prompt or of what it moves."""
        return self.buffer_bytes(micro_rows) + self._moved_bytes(micro_rows)

    def buffer_bytes(self, micro_rows: int) -> int:
        """Return those of :meth:`device_bytes` that are allocated at once."""
        stay = sum(self.layer_bytes(layer, self.rows) for layer in range(self.device_layers))
        return stay + self.passing_bytes(micro_rows)

    def passing_bytes(self, micro_rows: int) -> int:
        """Return the bytes on the device in which one micro-batch of a block passes whose home is host memory."""
        rows = min(micro_rows, self.rows)
        return max((self.layer_bytes(layer, rows) for layer in range(self.device_layers, len(self.layers))), default=0)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(self.layer_bytes(layer, self.rows) for layer in range(self.device_layers, len(self.layers)))

    def covers(self, other: "KeyValueCache | None") -> bool:
        """Return whether memory that was planned for this one has room for ``other``."""
        return other is None or (self.rows >= other.rows and self.tokens >= other.tokens)

    def sized(self, rows: int, tokens: int) -> "KeyValueCache":
        """Return the same for other sequences."""
        return replace(self, rows=rows, tokens=tokens)

    def on_device(self, layers: int) -> "KeyValueCache":
        """Return the same with as many blocks' keys and values on the device."""
        return replace(self, device_layers=layers)

    def _moved_bytes(self, micro_rows: int) -> int:
        rows = min(micro_rows, self.rows)
        sliding = [one for one in self.layers if one.window is not None and one.capacity(self.tokens) < self.tokens]
        return max((2 * rows * self.tokens * one.elements * self.itemsize for one in sliding), default=0)
