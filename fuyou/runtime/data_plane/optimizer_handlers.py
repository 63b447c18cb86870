"""Tasks that the optimizer process does: sent to it, and finished when it answers."""

import threading
from collections.abc import Callable, Collection, Sequence

from common.units import Interval
from fuyou.layout.record import Record
from fuyou.optimizer.adam import Update
from fuyou.optimizer.process.client import OptimizerLink
from fuyou.optimizer.process.protocol import (
    CreateRecord,
    ReadStates,
    Setup,
    Updated,
    UpdateRecord,
    WriteRecord,
    Written,
)
from fuyou.runtime.data_plane.buffers import Buffers
from fuyou.runtime.data_plane.stored_records import StoredRecords
from fuyou.runtime.device import optimizer_threads
from fuyou.runtime.executor import ELSEWHERE, Executor, Handler
from fuyou.schedule.tasks import Op, Task, known


class OptimizerHandlers:
    """The optimizer process as the tasks see it.

    Args:
        link: to the process, which is up but not set up.
        update_of: returns the update of a step when it starts.
        resident: records whose states stay in host memory.
        locks: descriptors that the process is to hold as well.
    """

    def __init__(
        self,
        link: OptimizerLink,
        stored: StoredRecords,
        update_of: Callable[[int], Update],
        resident: Collection[int] = (),
        locks: Sequence[int] = (),
    ):
        self._link = link
        self._stored = stored
        self._update_of = update_of
        self._resident = sorted(resident)
        self._locks = locks
        self._executor: Executor  # From :meth:`start` on
        self._lock = threading.Lock()
        self._updating: dict[int, Task] = {}
        self._writing: dict[int, Task] = {}
        self._early: set[int] = set()  # records whose write has ended before its task has started
        self._created: dict[int, threading.Event] = {}
        self._ssd_intervals: list[Interval] = []
        self._adam_intervals: list[Interval] = []
        self.read_bytes = self.written_bytes = 0

    def handlers(self) -> dict[Op, Handler]:
        return {
            Op.STATE_READ: self._state_read,
            Op.UPDATE: self._update,
            Op.STATE_WRITE: self._state_write,
            Op.RESIDENT_WRITE: self._resident_write,
        }

    def start(self, executor: Executor, buffers: Buffers) -> None:
        """Tell the process what it needs to know; from then on its answers finish tasks of ``executor``."""
        self._executor = executor
        layout = buffers.layout
        plan = buffers.plan
        device = buffers.device
        setup = Setup(
            directories=[str(path) for path in self._stored.store.directories],
            records=layout.records,
            chunk_elements=plan.chunk_elements,
            ring_chunks=plan.ring_chunks,
            shared=buffers.shared,
            resident=self._resident,
            throttle=device.throttle,
            threads=max(1, optimizer_threads(device) // layout.share.ranks_per_node),
        )
        self._link.set_up(setup, self._answered, executor.fail, self._locks)

    def create(self, record: Record, target: int, buffer: int) -> Callable[[], None]:
        """Write a trained record's first state, its split weights being in host buffers number ``buffer``; return what
        waits until it is written."""
        event = self._created[record.index] = threading.Event()
        self._link.send(CreateRecord(record.index, buffer, buffer, target))

        def wait() -> None:
            while not event.wait(0.2):
                failure = self._executor.failure
                if failure is not None:
                    raise failure

        return wait

    def close(self) -> None:
        self._link.close()

    def take_intervals(self) -> tuple[list[Interval], list[Interval]]:
        """Return the times of the process's I/O and of its computing since the last call."""
        with self._lock:
            taken = self._ssd_intervals, self._adam_intervals
            self._ssd_intervals = []
            self._adam_intervals = []
        return taken

    def _state_read(self, task: Task) -> None:
        record = known(task.record)
        slot = known(task.source)
        # What is in memory was compared when it was read, and may be in no slot at all by now.
        sums = self._stored.sums.checked(record, "states", slot).sums if task.nbytes else None
        self._link.send(ReadStates(record, slot, sums))

    def _update(self, task: Task) -> object:
        record = known(task.record)
        with self._lock:
            self._updating[record] = task
        update = self._update_of(task.step)
        missed = self._stored.missed.before(record, task.step)
        self._link.send(
            UpdateRecord(record, known(task.source), known(task.gradient), task.target, update, missed)
        )
        return ELSEWHERE

    def _state_write(self, task: Task) -> object | None:
        record = known(task.record)
        with self._lock:
            if record in self._early:
                self._early.remove(record)
                return None
            self._writing[record] = task
        return ELSEWHERE

    def _resident_write(self, task: Task) -> object:
        record = known(task.record)
        with self._lock:
            self._writing[record] = task
        self._link.send(WriteRecord(record, known(task.source), known(task.target)))
        return ELSEWHERE

    def _answered(self, message: object) -> None:
        if isinstance(message, Updated):
            self._stored.missed.updated(message.record, message.absent)
            with self._lock:
                task = self._updating.pop(message.record)
                self._adam_intervals += message.adam_intervals
            self._executor.finish(task, message.start_time)
        elif isinstance(message, Written):
            for part, sums in message.sums.items():
                self._stored.sums.written(message.record, part, message.slot, sums)
            # Threads send these, and the one that has counted first may come last.
            self.read_bytes = max(self.read_bytes, message.read_bytes)
            self.written_bytes = max(self.written_bytes, message.written_bytes)
            created = self._created.pop(message.record, None)
            if created is not None:
                created.set()
                return
            with self._lock:
                self._ssd_intervals += message.ssd_intervals
                write = self._writing.pop(message.record, None)
                if write is None:
                    self._early.add(message.record)
            if write is not None:
                self._executor.finish(write)
