"""Memory for optimizer states: a ring of chunk buffers, and memory of their own for records whose states stay."""

import queue
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from common.memory.buffers import HostBuffer
from fuyou.layout.record import Precision
from fuyou.layout.record_parts import Chunk


@dataclass
class ChunkMemory:
    """The memory of one chunk's states."""

    chunk: Chunk
    buffer: HostBuffer
    offset: int = 0
    """First byte in the buffer; 0 in a buffer of the ring."""
    resident: bool = False
    """Whether the states stay there; otherwise the buffer goes back to the ring."""
    reading: Future | None = None
    """Pending read of the states, if they are not in memory already."""
    read_times: list[float] = field(default_factory=list)
    """Time at which reading has started and, once it is done, the time at which it ended."""


class StateViews:
    """Views of one chunk's states, which lie one after the other: ``[low | mean | variance]``."""

    def __init__(self, memory: ChunkMemory, precision: Precision):
        buffer, offset, count = memory.buffer, memory.offset, memory.chunk.stop - memory.chunk.start
        self.low: torch.Tensor | None = None
        if precision.split:
            self.low = buffer.tensor(torch.int16, offset, count)
            offset += 2 * count
        width = precision.optimizer_dtype.itemsize
        self.mean = buffer.tensor(precision.optimizer_dtype, offset, count)
        self.variance = buffer.tensor(precision.optimizer_dtype, offset + width * count, count)


class ChunkRing:
    """Buffers of one chunk each, in private memory, which are used again and again.

    Args:
        count: number of buffers.
        nbytes: bytes of each.
    """

    def __init__(self, count: int, nbytes: int):
        self._free: queue.Queue[HostBuffer] = queue.Queue()
        for _ in range(count):
            self._free.put(HostBuffer(nbytes).touch())

    def take(self, chunk: Chunk) -> ChunkMemory:
        """Wait for a free buffer, and return it as the memory of ``chunk``."""
        return ChunkMemory(chunk, self._free.get())

    def give_back(self, memory: ChunkMemory) -> None:
        """Free the memory of a chunk, unless its states stay there."""
        if not memory.resident:
            self._free.put(memory.buffer)
