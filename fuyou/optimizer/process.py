"""The optimizer process: reads optimizer states, updates, writes back, all three at the same time.

A process of its own, so that neither the interpreter lock nor PyTorch's thread pool ties it to the engine's launch
loop. States pass through a ring of chunk buffers in private memory on huge pages: while one chunk is updated, the next
ones are being read and the ones before it written (Fuyou section 4.3, delayed write-back, by chunks rather
than by parameter groups). States of resident records have memory of their own and are updated there. Gradients and
parameters lie in memory that is shared with the engine.

Run as ``python -m fuyou.optimizer.process FD``; the engine does that.
"""

import collections
import contextlib
import functools
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import FinetuneError
from common.intervals import merge
from common.memory.buffers import HostBuffer
from common.store import Extent, Layout, Store
from common.store.checksums import Sums
from fuyou.layout.checksums import sealed_name
from fuyou.layout.record import PAGE_ELEMENTS, Chunk, Precision, Record, RecordExtents, allocate_extents
from fuyou.optimizer.absent_gradients import OwnedParameters
from fuyou.optimizer.adam import ChunkAdam
from fuyou.optimizer.protocol import (
    BEAT_SECONDS,
    Alive,
    CreateRecord,
    Failed,
    ReadStates,
    Ready,
    Setup,
    Updated,
    UpdateRecord,
    WriteRecord,
    Written,
)


@dataclass
class Write:
    """One record's write-back under way: counts chunks until all of it is on SSD."""

    record: int
    slot: int
    pending: int
    parameters: Sums
    states: Sums
    intervals: list[tuple[float, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class Place:
    """Where in memory a chunk's states are."""

    chunk: Chunk
    buffer: HostBuffer
    offset: int = 0
    """First byte; 0 in a buffer of the ring."""
    resident: bool = False
    """Whether they stay there; otherwise the buffer goes back to the ring."""
    reading: Future | None = None
    """What brings them, where they are not there already."""
    times: list[float] = field(default_factory=list)
    """When reading began and, once it is done, ended."""


class Resident:
    """States of a record that stay in memory: all of them, as they lie on SSD.

    ``written`` is the last write-back, which must be over before they are changed again.
    """

    def __init__(self, record: Record):
        self.buffer = HostBuffer(record.state_nbytes).touch()
        self.written: Write | None = None


class StateChunks:
    """Views of one chunk's states: ``[lo | mean | variance]``."""

    def __init__(self, place: Place, precision: Precision):
        buffer, offset, count = place.buffer, place.offset, place.chunk.stop - place.chunk.start
        self.lo: torch.Tensor | None = None
        if precision.split:
            self.lo = buffer.tensor(torch.int16, offset, count)
            offset += 2 * count
        width = precision.optimizer_dtype.itemsize
        self.mean = buffer.tensor(precision.optimizer_dtype, offset, count)
        self.variance = buffer.tensor(precision.optimizer_dtype, offset + width * count, count)


class OptimizerProcess:
    """Everything after the set-up message.

    Args:
        setup: what to work on.
        connection: pipe to the engine.
        shared_fd: the memory file with parameters and gradients.
        sending: held by whoever sends.
    """

    def __init__(self, setup: Setup, connection: Connection, shared_fd: int, sending: threading.Lock):
        self._setup = setup
        self._connection = connection
        self._sending = sending
        self._records = [
            Record.from_dict(index, content).shared(setup.share) for index, content in enumerate(setup.records)
        ]
        self._shared = HostBuffer(setup.shared.nbytes, fd=shared_fd).touch()
        directories = [Path(path) for path in setup.directories]
        self._store = Store.open(directories, io=setup.io, threads=setup.io_threads, pace=setup.pace)
        # The training files' places follow from the records alone; the store's layout holds just these, in this order.
        self._extents: list[RecordExtents] = allocate_extents(
            Layout(len(setup.directories)), self._records, setup.slots
        )
        width = max(record.precision.state_bytes for record in self._records if record.trainable)
        self._ring = [HostBuffer(setup.chunk_elements * width).touch() for _ in range(setup.ring_chunks)]
        self._free: queue.Queue[HostBuffer] = queue.Queue()
        for buffer in self._ring:
            self._free.put(buffer)
        self._resident = {index: Resident(self._records[index]) for index in setup.resident}
        self._announced: queue.Queue[ReadStates] = queue.Queue()
        self._read: queue.Queue[Place] = queue.Queue()
        self._updates: collections.deque[UpdateRecord | CreateRecord | WriteRecord] = collections.deque()
        self._arrived = threading.Condition()
        self._adam = ChunkAdam()
        self._owned = functools.cache(lambda index: OwnedParameters(self._records[index]))

    def run(self) -> None:
        """Serve until the engine closes the pipe."""
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        threading.Thread(target=self._guard, args=(self._read_ahead,), name="read ahead", daemon=True).start()
        self._send(Ready())
        while True:
            message = self._next_update()
            if isinstance(message, CreateRecord):
                self._create(message)
            elif isinstance(message, WriteRecord):
                self._write_resident(message)
            else:
                self._update(message)

    # -- threads --------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # the engine is gone or has closed us: nothing of ours is worth keeping
            if isinstance(message, ReadStates):
                self._announced.put(message)
            else:
                with self._arrived:
                    self._updates.append(message)
                    self._arrived.notify_all()

    def _read_ahead(self) -> None:
        """Read the announced records' states, chunk by chunk, as far ahead as there are free buffers."""
        while True:
            message = self._announced.get()
            extent = self._extents[message.record].states[message.source]
            resident = self._resident.get(message.record)
            sums = None
            if message.expected is not None:
                what = sealed_name(self._records[message.record], "states")
                sums = Sums(extent, self._store.directories, what, message.expected)
            for chunk in self._chunks(message.record):
                place = self._resident_place(message.record, chunk) if resident else Place(chunk, self._free.get())
                if not message.there:
                    self._start_reading(place, extent, self._records[message.record].precision.state_bytes, sums)
                self._read.put(place)

    def _start_reading(self, place: Place, extent: Extent, width: int, sums: Sums | None) -> None:
        first, nbytes = place.chunk.start * width, (place.chunk.stop - place.chunk.start) * width
        place.times.append(time.monotonic())
        place.reading = self._store.read(extent, place.buffer.bytes(place.offset, nbytes), first, nbytes, sums)
        place.reading.add_done_callback(lambda _: place.times.append(time.monotonic()))

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._fail(error)

    # -- work -----------------------------------------------------------------------------------------------------

    def _next_update(self) -> UpdateRecord | CreateRecord | WriteRecord:
        with self._arrived:
            self._arrived.wait_for(lambda: self._updates)
            return self._updates.popleft()

    def _update(self, message: UpdateRecord) -> None:
        record = self._records[message.record]
        parameters, gradients = self._parameter_bytes(message.parameters, record), self._gradients(message, record)
        values = torch.from_numpy(parameters).view(record.precision.dtype)
        write = self._begin_write(message.record, message.target)
        # Of stochastic rounding: no two ranks draw the same, for no rank has more chunks than pages.
        stream = record.share.owned_start(record.numel) // PAGE_ELEMENTS
        owned, left_out = self._owned(message.record), message.update.left_out
        absent = () if left_out else owned.absent(gradients)
        uneven = bool(absent or message.missed)
        began, computing = 0.0, []
        for number in range(write.pending):
            place = self._read.get()
            if place.reading is not None:
                place.reading.result()
                write.intervals.append((place.times[0], place.times[-1]))
            began = began or time.monotonic()
            chunk, states = place.chunk, StateChunks(place, record.precision)
            part = slice(chunk.start, chunk.stop)
            started = time.monotonic()
            self._adam.update(
                values[part], states.lo, states.mean, states.variance, gradients[part], message.update,
                decay=chunk.decay, stream=message.record << 32 | stream + number,
                runs=owned.runs(chunk, absent, message.missed) if uneven else None,
            )  # fmt: skip
            computing.append((started, time.monotonic()))
            if message.target is not None:
                self._write_chunk(write, place, parameters)
        if message.target is None:
            write.done.set()
        self._send(Updated(message.record, began, time.monotonic(), computing, absent))

    def _create(self, message: CreateRecord) -> None:
        record = self._records[message.record]
        parameters = self._parameter_bytes(message.parameters, record)
        low: torch.Tensor | None = None
        if record.precision.split:
            region = self._setup.shared.gradients[record.kind]
            low = self._shared.tensor(torch.int16, region.start(message.low_halves), record.owned)
        write = self._new_write(message.record, message.target)
        for chunk in self._chunks(message.record):
            place = Place(chunk, self._free.get())
            states = StateChunks(place, record.precision)
            if states.lo is not None and low is not None:
                states.lo.copy_(low[chunk.start : chunk.stop])
            states.mean.zero_()
            states.variance.zero_()
            self._write_chunk(write, place, parameters)

    def _write_resident(self, message: WriteRecord) -> None:
        parameters = self._parameter_bytes(message.parameters, self._records[message.record])
        write = self._begin_write(message.record, message.target)
        for chunk in self._chunks(message.record):
            self._write_chunk(write, self._resident_place(message.record, chunk), parameters)

    def _new_write(self, index: int, target: int | None) -> Write:
        record, extents, directories = self._records[index], self._extents[index], self._store.directories
        slot = target or 0  # None: nothing will be written
        return Write(
            index, slot, len(self._chunks(index)),
            Sums(extents.parameters[slot], directories, sealed_name(record, "parameters")),
            Sums(extents.states[slot], directories, sealed_name(record, "states")),
        )  # fmt: skip

    def _begin_write(self, index: int, target: int | None) -> Write:
        """A new write-back of a record; if its states are resident, after the last one is over."""
        write = self._new_write(index, target)
        resident = self._resident.get(index)
        if resident is not None:
            if resident.written is not None:
                resident.written.done.wait()
            resident.written = write
        return write

    def _write_chunk(self, write: Write, place: Place, parameters: np.ndarray) -> None:
        """Start writing one chunk's states and parameters; the buffer is free again when both are written."""
        extents, chunk = self._extents[write.record], place.chunk
        precision = self._records[write.record].precision
        width, count = precision.parameter_bytes, chunk.stop - chunk.start
        state_bytes = count * precision.state_bytes
        began = time.monotonic()
        first, stop = chunk.start * width, chunk.stop * width
        futures = [
            self._store.write(
                extents.states[write.slot], place.buffer.bytes(place.offset, state_bytes),
                chunk.start * precision.state_bytes, state_bytes, write.states,
            )
        ]  # fmt: skip
        if self._setup.share.nodes == 1:
            place_there, sums = extents.parameters[write.slot], write.parameters
            futures.append(self._store.write(place_there, parameters[first:stop], first, stop - first, sums))
        waiting = [len(futures)]

        def finished(future: Future) -> None:
            error = future.exception()
            if error is not None:
                self._fail(error)
            with write.lock:
                waiting[0] -= 1
                if waiting[0]:
                    return
                write.intervals.append((began, time.monotonic()))
                write.pending -= 1
                complete = not write.pending
            if not place.resident:
                self._free.put(place.buffer)
            if complete:
                write.done.set()
                self._send(
                    Written(
                        write.record, write.slot,
                        write.parameters.values if self._setup.share.nodes == 1 else (), write.states.values,
                        self._store.bytes_read, self._store.bytes_written, merge(write.intervals),
                    )
                )  # fmt: skip

        for future in futures:
            future.add_done_callback(finished)

    def _chunks(self, index: int) -> list[Chunk]:
        return self._records[index].chunks(self._setup.chunk_elements)

    def _resident_place(self, index: int, chunk: Chunk) -> Place:
        start = chunk.start * self._records[index].precision.state_bytes
        return Place(chunk, self._resident[index].buffer, start, resident=True)

    def _parameter_bytes(self, index: int, record: Record) -> np.ndarray:
        """What this rank owns of the parameters in host buffer ``index``."""
        region, width = self._setup.shared.parameters[record.kind], record.precision.parameter_bytes
        start = region.start(index) + record.share.owned_in_stored(record.numel) * width
        return self._shared.bytes(start, record.owned * width)

    def _gradients(self, message: UpdateRecord, record: Record) -> torch.Tensor:
        region = self._setup.shared.gradients[record.kind]
        return self._shared.tensor(record.precision.dtype, region.start(message.gradient), record.owned)

    def _send(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def _fail(self, error: BaseException) -> None:
        report(self._connection, error, self._sending)
        os._exit(1)


def report(connection: Connection, error: BaseException, lock: AbstractContextManager[Any] | None = None) -> None:
    """Tell the engine why the process ends, if it still listens."""
    expected = isinstance(error, FinetuneError)
    message = str(error) if expected else "".join(traceback.format_exception(error))
    with lock or contextlib.nullcontext(), contextlib.suppress(OSError):
        connection.send(Failed(message, expected))


def _beat(connection: Connection, sending: threading.Lock) -> None:
    """Say that we live, as long as somebody listens."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(BEAT_SECONDS)
            with sending:
                connection.send(Alive())


def _hold(connection: Connection, locks: int) -> None:
    """Take the run's locks from the engine. They are never closed: if it dies, we may still be writing."""
    if locks:
        with socket.socket(fileno=os.dup(connection.fileno())) as channel:
            socket.recv_fds(channel, 1, locks)


def main(pipe_fd: int) -> None:
    """Say hello, receive the set-up, serve."""
    # By this the engine ends us; a rank of several blocks it for itself, and what is blocked is inherited.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine decides what it means
    connection, sending = Connection(pipe_fd), threading.Lock()
    try:
        connection.send(Ready())
        threading.Thread(target=_beat, args=(connection, sending), name="alive", daemon=True).start()
        setup, shared_fd, locks = connection.recv()
        _hold(connection, locks)
        torch.set_num_threads(setup.threads)
        OptimizerProcess(setup, connection, shared_fd, sending).run()
    except EOFError:
        pass  # closed before it began
    except BaseException as error:
        report(connection, error, sending)
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
