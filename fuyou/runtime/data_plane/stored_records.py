"""Records in the training store, read and written with checksums, and scratch files for gradients and activations."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from common.store import Extent, Layout, Store, remove
from common.store.checksums import CheckedExtent, ExtentChecksums
from fuyou.layout.record import Record, RecordExtents
from fuyou.layout.record_sums import RecordSums
from fuyou.optimizer.absent_gradients import MissedUpdates
from fuyou.runtime.data_plane.buffers import Buffers
from fuyou.runtime.executor import Handler
from fuyou.schedule.tasks import Activation, Op, Task, known


@dataclass(frozen=True)
class StoredRecords:
    """The records of a training store."""

    store: Store  # Store that they are in, open
    extents: Sequence[RecordExtents]  # Place of each record
    sums: RecordSums  # Checksums of everything written
    missed: MissedUpdates  # Counts updates of parameters without a gradient

    def read_parameters(self, record: Record, slot: int, buffer: np.ndarray | torch.Tensor) -> Future:
        """Read a record's parameters, and compare them with their checksums.

        Args:
            buffer: where to, of at least the record's bytes: in host memory, or on the device if the store reads there.
        """
        return self.store.read(self.sums.checked(record.index, "parameters", slot), buffer)

    def write_parameters(self, record: Record, slot: int, values: np.ndarray) -> Future:
        """Write what the optimizer process does not: all of a record's parameters, or all that this rank stores."""
        extent = self.extents[record.index].parameters[slot]
        sums = self.sums.of_write(record.index, "parameters", slot, self.store.directories)

        def note() -> None:
            self.sums.written(record.index, "parameters", slot, sums.parts())

        return _and_then(self.store.write(extent, values, sums=sums), note)


def _and_then(first: Future, work: Callable[[], None]) -> Future:
    """Return a future that is done when ``first`` is and ``work`` was called; if ``first`` fails, it fails alike."""
    both: Future[None] = Future()

    def call(done: Future) -> None:
        try:
            done.result()
            work()
        except BaseException as error:
            both.set_exception(error)
        else:
            both.set_result(None)

    first.add_done_callback(call)
    return both


class Scratch:
    """A store of buffers' overflow; without a directory or file where the plan needs none.

    Args:
        directories: one per SSD; made here, and removed in the end.
        gradients: whether gradients may have to wait on SSD.
    """

    def __init__(self, buffers: Buffers, directories: Sequence[Path], gradients: bool):
        self._buffers = buffers
        self._directories = list(directories)
        store_layout = Layout(len(self._directories))
        counts = buffers.plan.counts
        layout = buffers.layout
        self._activations = {
            kind: [store_layout.allocate("activations", buffers.activation_bytes[kind]) for _ in range(count)]
            for kind, count in (
                (Activation.HIDDEN, counts.ssd_activations),
                (Activation.SAVED, counts.ssd_saved),
            )
        }
        waiting = layout.trainable if gradients else ()
        self._gradients = {
            index: store_layout.allocate("gradients", layout.records[index].gradient_nbytes)
            for index in waiting
        }
        self._written: dict[Extent, CheckedExtent] = {}
        self._is_needed = any(self._activations.values()) or bool(self._gradients)
        if self._is_needed:
            for path in self._directories:
                path.mkdir(exist_ok=True)
            throttle = buffers.device.throttle
            self._store = Store.create(self._directories, store_layout, overwrite=True, throttle=throttle)

    def handlers(self) -> dict[Op, Handler]:
        return {
            Op.GRADIENT_WRITE: self._gradient_write,
            Op.GRADIENT_READ: self._gradient_read,
            Op.ACTIVATION_WRITE: self._activation_write,
            Op.ACTIVATION_READ: self._activation_read,
        }

    def io_bytes(self) -> tuple[int, int]:
        """Return the bytes read and written so far."""
        return (self._store.bytes_read, self._store.bytes_written) if self._is_needed else (0, 0)

    def close(self) -> None:
        if self._is_needed:
            self._store.close()
            remove(self._directories)
            for path in self._directories:
                path.rmdir()

    def _gradient_write(self, task: Task) -> Future:
        record = self._buffers.layout.records[known(task.record)]
        buffer = self._buffers.host_gradients(record.kind, known(task.source), task.nbytes)
        return self._write(self._gradients[record.index], f"{record.name}, gradient", buffer)

    def _gradient_read(self, task: Task) -> Future:
        record = self._buffers.layout.records[known(task.record)]
        buffer = self._buffers.host_gradients(record.kind, known(task.target), task.nbytes)
        return self._store.read(self._written[self._gradients[record.index]], buffer)

    def _activation_write(self, task: Task) -> Future:
        extent = replace(self._activations[task.activation][known(task.target)], nbytes=task.nbytes)
        return self._write(
            extent, "overflow of activations", self._buffers.host_activation(task, known(task.source))
        )

    def _activation_read(self, task: Task) -> Future:
        extent = replace(self._activations[task.activation][known(task.source)], nbytes=task.nbytes)
        return self._store.read(
            self._written[extent], self._buffers.host_activation(task, known(task.target))
        )

    def _write(self, extent: Extent, what: str, buffer: np.ndarray) -> Future:
        sums = ExtentChecksums(extent, self._directories, what)

        def note() -> None:
            self._written[extent] = sums.checked()

        return _and_then(self._store.write(extent, buffer, sums=sums), note)
