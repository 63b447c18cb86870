"""Writing updated records back to the SSDs, chunk by chunk, while the next chunks are being updated."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from common.intervals import merge
from common.store import Store
from common.store.checksums import ExtentChecksums
from fuyou.layout.checksums import sealed_name
from fuyou.layout.record import Record, RecordExtents
from fuyou.optimizer.process.protocol import Written
from fuyou.optimizer.process.state_memory import ChunkMemory


@dataclass
class WriteBack:
    """One record's write-back under way; it counts chunks until all of them are on SSD."""

    record: int
    slot: int
    pending: int  # Chunks that are not written yet
    parameters: ExtentChecksums
    states: ExtentChecksums
    # Times at which reads and writes of the record started and ended.
    intervals: list[tuple[float, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)


class RecordWriter:
    """Writes records to their places in the store.

    Args:
        store: the store, open.
        records: the model's records, as this rank shares them.
        extents: their places.
        writes_parameters: whether parameters are written here as well as states.
        on_chunk: called when a chunk's buffer is no longer needed.
        on_record: called with the message for the engine when a record is written.
        on_failure: called with the error if a write fails.
    """

    def __init__(
        self,
        store: Store,
        records: Sequence[Record],
        extents: list[RecordExtents],
        writes_parameters: bool,
        on_chunk: Callable[[ChunkMemory], None],
        on_record: Callable[[Written], None],
        on_failure: Callable[[BaseException], None],
    ):
        self._store, self._records, self._extents = store, records, extents
        self._writes_parameters = writes_parameters
        self._on_chunk, self._on_record, self._on_failure = on_chunk, on_record, on_failure

    def begin(self, index: int, slot: int, chunks: int) -> WriteBack:
        """Return a write-back of record ``index``, in so many chunks, to ``slot``."""
        record, extents, directories = self._records[index], self._extents[index], self._store.directories
        return WriteBack(
            index,
            slot,
            chunks,
            ExtentChecksums(extents.parameters[slot], directories, sealed_name(record, "parameters")),
            ExtentChecksums(extents.states[slot], directories, sealed_name(record, "states")),
        )

    def write(self, write: WriteBack, memory: ChunkMemory, parameters: np.ndarray) -> None:
        """Start writing one chunk.

        Args:
            write: the write-back that it is a part of.
            memory: its states.
            parameters: those of the whole record that this rank owns, ``uint8``.
        """
        extents, chunk = self._extents[write.record], memory.chunk
        precision = self._records[write.record].precision
        width, nbytes = precision.parameter_bytes, precision.state_nbytes(chunk.stop - chunk.start)
        at = precision.state_nbytes(chunk.start)
        start_time = time.monotonic()
        states = memory.buffer.bytes(memory.offset, nbytes)
        futures = [self._store.write(extents.states[write.slot], states, at, nbytes, write.states)]
        if self._writes_parameters:
            extent, first, stop = extents.parameters[write.slot], chunk.start * width, chunk.stop * width
            futures.append(self._store.write(extent, parameters[first:stop], first, stop - first, write.parameters))
        waiting = [len(futures)]

        def finished(future: Future) -> None:
            error = future.exception()
            if error is not None:
                self._on_failure(error)
            with write.lock:
                waiting[0] -= 1
                if waiting[0]:
                    return
                write.intervals.append((start_time, time.monotonic()))
                write.pending -= 1
                complete = not write.pending
            self._on_chunk(memory)
            if complete:
                self._finish(write)

        for future in futures:
            future.add_done_callback(finished)

    def _finish(self, write: WriteBack) -> None:
        write.done.set()
        self._on_record(
            Written(
                write.record,
                write.slot,
                write.parameters.values if self._writes_parameters else (),
                write.states.values,
                self._store.bytes_read,
                self._store.bytes_written,
                merge(write.intervals),
            )
        )
