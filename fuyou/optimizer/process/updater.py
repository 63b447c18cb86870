"""The work of the optimizer process: read optimizer states ahead, update records, and write them back."""

import functools
import os
import queue
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from common.memory.buffers import HostBuffer
from common.store import Layout, Store
from fuyou.layout.record import Record, allocate_extents
from fuyou.layout.record_parts import LOW, MOMENTS, Chunk, scale_of
from fuyou.layout.record_sums import RecordSums
from fuyou.optimizer.absent_gradients import OwnedParameters
from fuyou.optimizer.chunk_update import ChunkOptimizer, tried_kernels
from fuyou.optimizer.moments import OptimizerStates
from fuyou.optimizer.process.protocol import (
    CreateRecord,
    EnginePipe,
    ReadStates,
    Setup,
    Updated,
    UpdateRecord,
    WriteRecord,
)
from fuyou.optimizer.process.write_back import (
    ChunkMemory,
    RecordWriter,
    WriteBack,
    state_views,
)


class _ResidentStates:
    def __init__(self, record: Record):
        self.buffer = HostBuffer(record.state_nbytes).touch()
        # Latest write-back, which must end before the states change again
        self.write: WriteBack | None = None


class RecordUpdater:
    """Updates records on the engine's messages.

    States pass through a ring of chunk buffers: while one chunk is updated, the next are read and the previous written
    (Fuyou section 4.3, delayed write-back, by chunks rather than by parameter groups). States of resident records are
    updated in separate memory. Gradients and parameters are in memory shared with the engine.

    Args:
        shared_fd: descriptor of the memory file with parameters and gradients.
    """

    def __init__(self, setup: Setup, pipe: EnginePipe, shared_fd: int):
        self._setup = setup
        self._pipe = pipe
        self._records = setup.records
        self._shared = HostBuffer(setup.shared.nbytes, fd=shared_fd)
        directories = [Path(path) for path in setup.directories]
        self._store = Store.open(directories, throttle=setup.throttle)
        # The training files' extents follow from the records alone; the store's layout holds just these, in this order.
        extents = allocate_extents(Layout(len(setup.directories)), self._records)
        self._sums = RecordSums(self._records, extents, setup.chunk_elements, {})
        precisions = [record.precision for record in self._records if record.trainable]
        self._free: queue.Queue[HostBuffer] = queue.Queue()  # The ring's buffers that hold nothing
        for _ in range(setup.ring_chunks):
            nbytes = max(precision.state_nbytes(setup.chunk_elements) for precision in precisions)
            self._free.put(HostBuffer(nbytes).touch())
        self._resident = {index: _ResidentStates(self._records[index]) for index in setup.resident}
        self._writer = RecordWriter(self._store, self._records, extents, self._sums, self._free, pipe)
        self._announced: queue.Queue[ReadStates] = queue.Queue()
        self._read: queue.Queue[ChunkMemory] = queue.Queue()
        self._updates: queue.Queue[UpdateRecord | CreateRecord | WriteRecord] = queue.Queue()
        optimizer = precisions[0].optimizer  # one for all records
        self._optimizer = ChunkOptimizer(optimizer, tried_kernels(optimizer))
        self._owned = functools.cache(lambda index: OwnedParameters(self._records[index]))

    def run(self) -> None:
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        threading.Thread(target=self._read_ahead, name="read ahead", daemon=True).start()
        while True:
            message = self._updates.get()
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
                message = self._pipe.receive()
            except (EOFError, OSError):
                os._exit(0)  # the engine has ended or closed the pipe
            if isinstance(message, ReadStates):
                self._announced.put(message)
            else:
                self._updates.put(message)

    def _read_ahead(self) -> None:
        try:
            while True:
                self._read_states(self._announced.get())
        except BaseException as error:
            self._pipe.fail(error)

    def _read_states(self, message: ReadStates) -> None:
        resident = message.record in self._resident
        precision = self._records[message.record].precision
        checked = None
        if message.sums is not None:
            self._sums.written(message.record, "states", message.source, message.sums)
            checked = self._sums.checked(message.record, "states", message.source)
        for chunk in self._chunks(message.record):
            memory = self._resident_memory(message.record, chunk) if resident else self._ring_memory(chunk)
            if checked is not None:
                first = precision.state_nbytes(chunk.start)
                nbytes = precision.state_nbytes(chunk.stop - chunk.start)
                memory.read_times.append(time.monotonic())
                states = memory.buffer.bytes(memory.offset, nbytes)
                memory.reading = self._store.read(checked, states, first, nbytes)
                memory.reading.add_done_callback(functools.partial(_note_time, memory.read_times))
            self._read.put(memory)

    # -- work -----------------------------------------------------------------------------------------------------

    def _update(self, message: UpdateRecord) -> None:
        record = self._records[message.record]
        parameters = self._parameter_bytes(message.parameters, record)
        start = self._setup.shared.gradients[record.kind].start(message.gradient)
        gradients = self._shared.tensor(record.precision.dtype, start, record.owned)
        values = torch.from_numpy(parameters).view(record.precision.dtype)
        write = self._begin_write(message.record, message.target)
        owned = self._owned(message.record)
        absent = owned.absent(gradients)
        uneven = bool(absent or message.missed)
        start_time = 0.0
        computing = []
        for _ in range(write.pending):
            memory = self._read.get()
            if memory.reading is not None:
                memory.reading.result()
                write.intervals.append((memory.read_times[0], memory.read_times[-1]))
            chunk_start_time = time.monotonic()
            start_time = start_time or chunk_start_time
            chunk = memory.chunk
            views = state_views(memory, record.precision)
            part = slice(chunk.start, chunk.stop)
            scales = tuple(views[scale_of(name)] for name in MOMENTS if scale_of(name) in views)
            moments = tuple(views[name] for name in MOMENTS)
            self._optimizer.update(
                OptimizerStates(values[part], views.get(LOW), moments, scales),
                gradients[part],
                message.update,
                decay=chunk.decay,
                runs=owned.runs(chunk, absent, message.missed) if uneven else None,
            )
            computing.append((chunk_start_time, time.monotonic()))
            if message.target is not None:
                self._writer.write(write, memory, parameters)
        if message.target is None:
            write.done.set()
        self._pipe.send(Updated(message.record, start_time, time.monotonic(), computing, absent))

    def _create(self, message: CreateRecord) -> None:
        record = self._records[message.record]
        parameters = self._parameter_bytes(message.parameters, record)
        low: np.ndarray | None = None
        if record.precision.split:
            start = self._setup.shared.gradients[record.kind].start(message.low_bits)
            low = self._shared.bytes(start, record.precision.components[0].nbytes(record.owned))
        chunks = self._chunks(message.record)
        write = self._writer.begin(message.record, message.target, len(chunks))
        for chunk in chunks:
            self._writer.write_first(write, chunk, low, parameters)

    def _write_resident(self, message: WriteRecord) -> None:
        parameters = self._parameter_bytes(message.parameters, self._records[message.record])
        write = self._begin_write(message.record, message.target)
        for chunk in self._chunks(message.record):
            self._writer.write(write, self._resident_memory(message.record, chunk), parameters)

    def _begin_write(self, index: int, target: int | None) -> WriteBack:
        # None: nothing will be written
        write = self._writer.begin(index, target or 0, len(self._chunks(index)))
        resident = self._resident.get(index)
        if resident is not None:
            if resident.write is not None:
                resident.write.done.wait()
            resident.write = write
        return write

    def _chunks(self, index: int) -> list[Chunk]:
        return self._records[index].chunks(self._setup.chunk_elements)

    def _ring_memory(self, chunk: Chunk) -> ChunkMemory:
        """Wait for a free buffer."""
        return ChunkMemory(chunk, self._free.get())

    def _resident_memory(self, index: int, chunk: Chunk) -> ChunkMemory:
        start = self._records[index].precision.state_nbytes(chunk.start)
        return ChunkMemory(chunk, self._resident[index].buffer, start, resident=True)

    def _parameter_bytes(self, index: int, record: Record) -> np.ndarray:
        region = self._setup.shared.parameters[record.kind]
        width = record.precision.parameter_bytes
        start = region.start(index) + record.share.node * record.owned * width
        return self._shared.bytes(start, record.owned * width)


def _note_time(times: list[float], _: Future) -> None:
    times.append(time.monotonic())
