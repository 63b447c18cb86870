"""Memory for optimizer states: a ring of chunk buffers, and memory of their own for records whose states stay."""

import queue
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from common.memory.buffers import HostBuffer
from fuyou.layout.optimizer_state import LOW, OPTIMIZERS, scale_of
from fuyou.layout.record import Precision
from fuyou.layout.record_parts import Chunk
from fuyou.optimizer.moments import OptimizerStates


@dataclass
class ChunkMemory:
    """The memory of one chunk's states."""

    chunk: Chunk
    buffer: HostBuffer
    offset: int = 0  # First byte in the buffer; 0 in a buffer of the ring
    resident: bool = False  # Whether the states stay there; otherwise the buffer goes back to the ring
    reading: Future | None = None  # Pending read of the states, if they are not in memory already
    # Time at which reading has started and, once it is done, the time at which it ended.
    read_times: list[float] = field(default_factory=list)


def state_views(memory: ChunkMemory, precision: Precision) -> dict[str, torch.Tensor]:
    """Return views of one chunk's states, which lie one after the other, by the names of their components."""
    offset, count = memory.offset, memory.chunk.stop - memory.chunk.start
    views = {}
    for component in precision.components:
        nbytes = component.nbytes(count)
        views[component.name] = memory.buffer.tensor(component.dtype, offset, nbytes // component.dtype.itemsize)
        offset += nbytes
    return views


def optimizer_states(parameter: torch.Tensor, views: dict[str, torch.Tensor], optimizer: str) -> OptimizerStates:
    """Return the states of one chunk as an update takes them.

    Args:
        parameter: the chunk's parameters.
        views: as :func:`state_views` has returned them.
        optimizer: its name.
    """
    names = OPTIMIZERS[optimizer].moments
    scales = tuple(views[scale_of(name)] for name in names if scale_of(name) in views)
    return OptimizerStates(parameter, views.get(LOW), tuple(views[name] for name in names), scales)


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
