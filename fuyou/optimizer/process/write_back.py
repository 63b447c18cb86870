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
    offset, count = memory.offset, memory.chunk.stop - memory.chunk.start
    views = {}
    for component in precision.components:
        nbytes = component.nbytes(count)
        views[component.name] = memory.buffer.tensor(component.dtype, offset, nbytes // component.dtype.itemsize)
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
        self._store, self._records, self._extents, self._sums = store, records, extents, sums
        self._free, self._pipe = free, pipe
        # Of several nodes, the engine writes the parameters once they are spread.
        self._parts = PARTS if records[0].share.nodes == 1 else PARTS[1:]

    def begin(self, index: int, slot: int, chunks: int) -> WriteBack:
        """Return a write-back of record ``index`` in ``chunks`` chunks to ``slot``."""
        directories = self._store.directories
        sums = {part: self._sums.of_write(index, part, slot, directories) for part in self._parts}
        return WriteBack(index, slot, chunks, sums)

    def write(self, write: WriteBack, memory: ChunkMemory, parameters: np.ndarray) -> None:
        """Start writing one chunk; ``parameters`` are those of the whole record that this rank owns, ``uint8``."""
        extents, chunk = self._extents[write.record], memory.chunk
        precision = self._records[write.record].precision
        width, nbytes = precision.parameter_bytes, precision.state_nbytes(chunk.stop - chunk.start)
        at = precision.state_nbytes(chunk.start)
        start_time = time.monotonic()
        states = memory.buffer.bytes(memory.offset, nbytes)
        futures = [self._store.write(extents.states[write.slot], states, at, nbytes, write.sums["states"])]
        if "parameters" in write.sums:
            extent, first, stop = extents.parameters[write.slot], chunk.start * width, chunk.stop * width
            values, of_parameters = parameters[first:stop], write.sums["parameters"]
            futures.append(self._store.write(extent, values, first, stop - first, of_parameters))
        waiting = [len(futures)]

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
            if not memory.resident:
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
