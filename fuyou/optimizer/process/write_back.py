"""Write updated records back to the SSDs, chunk by chunk, while the next chunks are updated."""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from common.memory.buffers import HostBuffer
from common.store import Store
from common.store.checksums import ExtentChecksums
from common.units import merge
from fuyou.layout.record import Precision, Record, RecordExtents
from fuyou.layout.record_parts import Chunk
from fuyou.layout.record_sums import PARTS, Part, RecordSums
from fuyou.optimizer.process.protocol import EnginePipe, Written


@dataclass
class ChunkMemory:
    """Memory of one chunk's states."""

    chunk: Chunk
    buffer: HostBuffer
    offset: int = 0  # First byte in the buffer; 0 in a buffer of the ring
    resident: bool = False  # Whether the states stay there; otherwise the buffer goes back to the ring
    reading: Future | None = None  # Pending read of the states, if they are not in memory already
    read_times: list[float] = field(default_factory=list)  # Start and, once done, end of reading


def state_views(memory: ChunkMemory, precision: Precision) -> dict[str, torch.Tensor]:
    """Return views of one chunk's states, which lie one after the other, by component name."""
    offset = memory.offset
    count = memory.chunk.stop - memory.chunk.start
    views = {}
    for component in precision.components:
        nbytes = component.nbytes(count)
        views[component.name] = memory.buffer.tensor(
            component.dtype, offset, nbytes // component.dtype.itemsize
        )
        offset += nbytes
    return views


@dataclass
class WriteBack:
    """A running write-back of one record; counts chunks until all are on SSD."""

    record: int
    slot: int
    pending: int  # Chunks that are not written yet
    sums: dict[Part, ExtentChecksums]  # Of what is written
    intervals: list[tuple[float, float]] = field(default_factory=list)  # Times of the record's I/O
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)


class RecordWriter:
    """Writes records to their extents in the store.

    Args:
        free: where buffers of the ring go when they are written.
        pipe: to the engine, which gets messages on written records and failures.
    """

    def __init__(
        self,
        store: Store,
        records: Sequence[Record],
        extents: Sequence[RecordExtents],
        sums: RecordSums,
        free: "queue.Queue[HostBuffer]",
        pipe: EnginePipe,
    ):
        self._store = store
        self._records = records
        self._extents = extents
        self._sums = sums
        self._free = free
        self._pipe = pipe
        # Of several nodes, the engine writes the parameters once they are spread.
        self._parts = PARTS if records[0].share.nodes == 1 else PARTS[1:]

    def begin(self, index: int, slot: int, chunks: int) -> WriteBack:
        """Return a write-back of record ``index`` in ``chunks`` chunks to ``slot``."""
        directories = self._store.directories
        sums = {part: self._sums.of_write(index, part, slot, directories) for part in self._parts}
        return WriteBack(index, slot, chunks, sums)

    def write(self, write: WriteBack, memory: ChunkMemory, parameters: np.ndarray) -> None:
        """Start writing one chunk; ``parameters`` are those of the whole record that this rank owns, ``uint8``."""
        at, nbytes = self._place_of_states(write, memory.chunk)
        states = memory.buffer.bytes(memory.offset, nbytes)
        extent = self._extents[write.record].states[write.slot]
        future = self._store.write(extent, states, at, nbytes, write.sums["states"])
        self._wait(write, memory, [future, *self._write_parameters(write, memory.chunk, parameters)])

    def write_first(
        self, write: WriteBack, chunk: Chunk, low: np.ndarray | None, parameters: np.ndarray
    ) -> None:
        """Start writing one chunk to a new store, with moments of zero: there is nothing to write of them.

        Args:
            low: low bits of the record's weights that this rank owns, ``uint8``; None if they are not split.
        """
        at, nbytes = self._place_of_states(write, chunk)
        extent = self._extents[write.record].states[write.slot]
        sums = write.sums["states"]
        futures = self._write_parameters(write, chunk, parameters)
        written = 0
        if low is not None:
            component = self._records[write.record].precision.components[0]
            first = component.nbytes(chunk.start)
            written = component.nbytes(chunk.stop - chunk.start)
            futures.append(self._store.write(extent, low[first : first + written], at, written, sums))
        self._store.leave_zeros(extent, at + written, nbytes - written, sums)
        if not futures:  # the engine writes the parameters, and all states are zero
            futures.append(Future())
            futures[0].set_result(None)
        self._wait(write, None, futures)

    def _place_of_states(self, write: WriteBack, chunk: Chunk) -> tuple[int, int]:
        """Return the first byte of a chunk's states in their extent, and their number."""
        precision = self._records[write.record].precision
        return precision.state_nbytes(chunk.start), precision.state_nbytes(chunk.stop - chunk.start)

    def _write_parameters(self, write: WriteBack, chunk: Chunk, parameters: np.ndarray) -> list[Future]:
        if "parameters" not in write.sums:
            return []
        width = self._records[write.record].precision.parameter_bytes
        first = chunk.start * width
        stop = chunk.stop * width
        extent = self._extents[write.record].parameters[write.slot]
        sums = write.sums["parameters"]
        return [self._store.write(extent, parameters[first:stop], first, stop - first, sums)]

    def _wait(self, write: WriteBack, memory: ChunkMemory | None, futures: Sequence[Future]) -> None:
        """Note when all parts of a chunk are written; the ring gets its memory back then."""
        waiting, start_time = [len(futures)], time.monotonic()

        def finished(future: Future) -> None:
            error = future.exception()
            if error is not None:
                self._pipe.fail(error)
            with write.lock:
                waiting[0] -= 1
                if waiting[0]:
                    return
                write.intervals.append((start_time, time.monotonic()))
                write.pending -= 1
                complete = not write.pending
            if memory is not None and not memory.resident:
                self._free.put(memory.buffer)
            if complete:
                self._finish(write)

        for future in futures:
            future.add_done_callback(finished)

    def _finish(self, write: WriteBack) -> None:
        write.done.set()
        self._pipe.send(
            Written(
                write.record,
                write.slot,
                {part: sums.parts() for part, sums in write.sums.items()},
                self._store.bytes_read,
                self._store.bytes_written,
                merge(write.intervals),
            )
        )
