"""Files that do not outlive the run: activations and waiting gradients that find no room in host memory."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from common.store import Layout, Store, remove
from fuyou.runtime.data_plane.buffers import Buffers
from fuyou.runtime.executor import Handler
from fuyou.schedule.tasks import Activation, Op, Task, known


class Scratch:
    """A store of buffers' overflow; without a directory or file where the plan needs none.

    Args:
        buffers: which the bytes come from and go to.
        directories: one per SSD; made here, and removed in the end.
        gradients: whether gradients may have to wait on SSD.
    """

    def __init__(self, buffers: Buffers, directories: Sequence[Path], gradients: bool):
        self._buffers, self._directories = buffers, list(directories)
        layout, counts, shape = Layout(len(self._directories)), buffers.plan.counts, buffers.shape
        self._activations = {
            kind: [layout.allocate("activations", buffers.activation_bytes[kind]) for _ in range(count)]
            for kind, count in ((Activation.HIDDEN, counts.ssd_activations), (Activation.KEPT, counts.ssd_kept))
        }
        waiting = shape.trainable if gradients else ()
        self._gradients = {
            index: layout.allocate("gradients", shape.records[index].gradient_nbytes) for index in waiting
        }
        self._opened: Store | None = None
        if any(self._activations.values()) or self._gradients:
            for path in self._directories:
                path.mkdir(exist_ok=True)
            throttle = buffers.device.throttle
            self._opened = Store.create(self._directories, layout, overwrite=True, throttle=throttle)

    def handlers(self) -> dict[Op, Handler]:
        """Return what does each kind of task that reads or writes here."""
        return {
            Op.GRADIENT_WRITE: self._gradient_write,
            Op.GRADIENT_READ: self._gradient_read,
            Op.ACTIVATION_WRITE: self._activation_write,
            Op.ACTIVATION_READ: self._activation_read,
        }

    def io_bytes(self) -> tuple[int, int]:
        """Return the bytes read and written so far."""
        return (0, 0) if self._opened is None else (self._opened.bytes_read, self._opened.bytes_written)

    def close(self) -> None:
        """Remove all files."""
        if self._opened is not None:
            self._opened.close()
            remove(self._directories)
            for path in self._directories:
                path.rmdir()

    @property
    def _store(self) -> Store:
        assert self._opened is not None
        return self._opened

    def _gradient_write(self, task: Task) -> Future:
        record = self._buffers.shape.records[known(task.record)]
        buffer = self._buffers.host_gradients(record.kind, known(task.source), task.nbytes)
        return self._store.write(self._gradients[record.index], buffer)

    def _gradient_read(self, task: Task) -> Future:
        record = self._buffers.shape.records[known(task.record)]
        buffer = self._buffers.host_gradients(record.kind, known(task.target), task.nbytes)
        return self._store.read(self._gradients[record.index], buffer)

    def _activation_write(self, task: Task) -> Future:
        place = self._activations[task.activation][known(task.target)]
        return self._store.write(place, self._buffers.host_activation(task, known(task.source)), 0, task.nbytes)

    def _activation_read(self, task: Task) -> Future:
        place = self._activations[task.activation][known(task.source)]
        return self._store.read(place, self._buffers.host_activation(task, known(task.target)), 0, task.nbytes)
