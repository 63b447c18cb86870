"""Which buffers hold which records' parameters and gradients, and their slots on SSD: those needed soonest stay."""

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fuyou.layout.model_layout import BufferCounts, ModelLayout
from fuyou.layout.record import Kind, Record
from fuyou.schedule.buffer_pool import NEVER, Pool
from fuyou.schedule.tasks import Op, Task


class AddTask(Protocol):
    """Appends a task to the list."""

    def __call__(self, op: Op, after: list[Task], **fields: int | None) -> Task: ...


@dataclass(frozen=True)
class UpdatedRecord:
    """A record in host memory after its update."""

    index: int  # Index of the record
    update: Task
    ready: Task  # Task after which other nodes' updates are there, too; `update` if there are none
    host: int  # Host buffer of its parameters


class RecordSlots:
    """Slots that records are read from and written to. A commit makes the newest state of all records valid.

    Args:
        slot: the slot that holds the last committed state. (Frozen records have only the first.)

    Attributes:
        newest: by record, the slot of its newest state, perhaps still being written.
        writes: by record, the newest tasks that write it.
        commit: the newest commit, if there has been one.
    """

    def __init__(self, layout: ModelLayout, slot: int, host: Mapping[Kind, Pool], emit: AddTask):
        self._layout = layout
        self._host = host
        self._emit = emit
        self._committed = slot
        self._unwritten: dict[int, UpdatedRecord] = {}  # resident records that are newer than on SSD
        self.newest = [slot if record.trainable else 0 for record in layout.records]
        self.writes: list[list[Task]] = [[] for _ in layout.records]
        self.commit: Task | None = None

    @property
    def target(self) -> int:
        return 1 - self._committed

    def revert(self, index: int) -> None:
        """Reset the record to the committed slot."""
        self.newest[index] = self._committed

    def write(self, updated: UpdatedRecord) -> None:
        self._unwritten.pop(updated.index, None)
        self._write(Op.STATE_WRITE, updated)

    def leave_unwritten(self, updated: UpdatedRecord) -> None:
        """Note that a resident record is not written until a later update or a commit."""
        self._unwritten[updated.index] = updated

    def commit_step(self, step: int, ended: Task | None) -> None:
        """Commit ``step`` when all writes are done and the caller has ``ended`` it."""
        for updated in self._unwritten.values():
            # Updated in a step that was not due, and committed by a flush
            self._write(Op.RESIDENT_WRITE, updated)
        self._unwritten.clear()
        after = list(itertools.chain.from_iterable(self.writes))
        after += [task for task in (ended, self.commit) if task is not None]
        self._committed = self.newest[self._layout.trainable[0]]
        self.commit = self._emit(Op.COMMIT, after, target=self._committed)
        self.commit.step = step

    def _write(self, op: Op, updated: UpdatedRecord) -> None:
        record = self._layout.records[updated.index]
        together = updated.ready is updated.update
        fields = {"record": updated.index, "source": updated.host, "target": self.target}
        nbytes = record.state_nbytes + (record.parameter_nbytes if together else 0)
        writes = [self._emit(op, [updated.update], nbytes=nbytes, **fields)]
        if not together:
            writes.append(
                self._emit(Op.PARAMETER_WRITE, [updated.ready], nbytes=record.parameter_nbytes, **fields)
            )
        for write in writes:
            self._host[record.kind].use(updated.host, write)
        self.writes[updated.index] = writes
        self.newest[updated.index] = self.target


class ParameterPools:
    """Which buffers hold the parameters of which records.

    Args:
        used_from_host: returns whether a record would be used again from one of this many host buffers; if not, it
            bypasses host memory. None: nothing does.
    """

    def __init__(
        self,
        counts: BufferCounts,
        host: dict[Kind, Pool],
        slots: RecordSlots,
        next_use: Callable[[Hashable], float],
        emit: AddTask,
        used_from_host: Callable[[Record, int], bool] | None = None,
    ):
        self._device = {
            kind: Pool(
                f"device parameters ({kind.value})",
                counts.device(kind),
                next_use,
                _spared(counts.device(kind)),
            )
            for kind in Kind
        }
        self._host = host
        self._slots = slots
        self._emit = emit
        self._used_from_host = used_from_host

    def begin_pass(self) -> None:
        """Start positions again, which changes all next uses."""
        for pool in self._host.values():
            pool.sort_again()

    def begin_visit(self, records: Collection[Record]) -> None:
        """Note that ``records`` are used at this position, which changes their next use."""
        for record in records:
            self._host[record.kind].update_next_use(record.index)

    def end_visit(self) -> None:
        """Note that all uses of a visit are known."""
        for pool in self._device.values():
            pool.end_computation()

    def on_device(self, record: Record) -> tuple[int, Task]:
        """Return the device buffer with the record's parameters, and the task that fills it."""
        pool = self._device[record.kind]
        index = pool.find(record.index)
        if index is not None:
            return index, pool.slots[index].filled
        index, ready = self._read_to_device(record) if self._bypasses_host(record) else self._upload(record)
        if record.share.ranks_per_node > 1:
            filled = record.filled_slices[record.share.local_rank]
            nbytes = (record.share.ranks_per_node - 1) * filled * record.unit_bytes
            ready = self._emit(Op.PARAMETER_GATHER, [ready], record=record.index, target=index, nbytes=nbytes)
        pool.fill(index, record.index, ready)
        return index, ready

    def _bypasses_host(self, record: Record) -> bool:
        """Return whether the record bypasses host memory, because nothing would use it from there."""
        host = self._host[record.kind]
        if self._used_from_host is None or host.find(record.index) is not None or host.has_room():
            return False
        return not self._used_from_host(record, len(host.slots))

    def _read_to_device(self, record: Record) -> tuple[int, Task]:
        pool = self._device[record.kind]
        index, _ = pool.take(record.index)
        return index, self._read(Op.PARAMETER_READ_DEVICE, record, index, pool.slots[index].busy())

    def _upload(self, record: Record) -> tuple[int, Task]:
        pool = self._device[record.kind]
        source, loaded = self.on_host(record)
        index, _ = pool.take(record.index)
        upload = self._emit(
            Op.PARAMETER_UPLOAD,
            [loaded, *pool.slots[index].busy()],
            record=record.index,
            source=source,
            target=index,
            nbytes=record.parameter_nbytes,
        )
        self._host[record.kind].use(source, upload)
        return index, upload

    def on_host(self, record: Record) -> tuple[int, Task]:
        """Return the host buffer with the record's newest parameters, and the task that fills it."""
        pool = self._host[record.kind]
        index = pool.find(record.index)
        if index is not None:
            return index, pool.slots[index].filled
        index, _ = pool.take(record.index)
        read = self._read(Op.PARAMETER_READ, record, index, pool.slots[index].busy())
        pool.fill(index, record.index, read)
        return index, read

    def _read(self, op: Op, record: Record, target: int, busy: list[Task]) -> Task:
        return self._emit(
            op,
            [*busy, *self._slots.writes[record.index]],
            record=record.index,
            source=self._slots.newest[record.index],
            target=target,
            nbytes=record.parameter_nbytes,
        )

    def use_on_device(self, record: Record, buffer: int, task: Task) -> None:
        self._device[record.kind].use(buffer, task)

    def host_users(self, record: Record, buffer: int) -> list[Task]:
        """Return the tasks that use the record's parameters in a host buffer."""
        return self._host[record.kind].slots[buffer].users

    def update_on_host(self, record: Record, buffer: int, ready: Task) -> None:
        """Note that the host buffer has new parameters after ``ready``: the device's copy is stale."""
        self._host[record.kind].fill(buffer, record.index, ready)
        self.drop_from_device(record)

    def drop_from_device(self, record: Record) -> None:
        self._device[record.kind].drop(record.index)

    def drop_from_host(self, record: Record) -> None:
        self._host[record.kind].drop(record.index)


def _spared(buffers: int) -> int:
    """Return how many of the newest visits keep their device buffers, regardless of their next use.

    Pieces of a block repeat in the same order for every micro-batch. The piece needed latest is then the one just used:
    given to the next upload, every upload would wait for the computation before it. So half of several buffers
    alternate for uploads ahead of their use, and the other half hold the pieces needed soonest.
    """
    return buffers // 2 if buffers > 2 else 0


class GradientPools:
    """Gradients in host memory: on their way to their update, deferred, or saved in case the update runs again.

    Those that must leave for another gradient are written to SSD.

    Args:
        first_use: returns the position of a record's first use in a step, by which its update must be done.
    """

    def __init__(
        self, layout: ModelLayout, counts: BufferCounts, first_use: Callable[[int], int], emit: AddTask
    ):
        self._records = layout.records
        self._first_use = first_use
        self._emit = emit
        self._pools = {
            kind: Pool(f"host gradients ({kind.value})", counts.host_gradients(kind), self._next_use)
            for kind in Kind
        }
        self.pending: dict[int, int] = {}
        """Record -> step of its gradient, which waits for its update."""
        self.speculated: dict[int, int] = {}
        """Record -> step of its gradient, whose update is done and may have to be done again."""
        self._spilled: dict[int, Task] = {}  # record -> the task that writes its gradient to SSD

    def take(self, record: Record) -> tuple[int, list[Task]]:
        """Return a buffer for the record's gradient, and the tasks after which it may be overwritten."""
        pool = self._pools[record.kind]
        index, leaving = pool.take(record.index)
        after = pool.slots[index].busy()
        if isinstance(leaving, int):
            write = self._spilled[leaving] = self._emit(
                Op.GRADIENT_WRITE,
                [pool.slots[index].filled],
                record=leaving,
                source=index,
                nbytes=self._records[leaving].gradient_nbytes,
            )
            after.append(write)
        return index, after

    def fill(self, index: int, record: Record, ready: Task) -> None:
        self._pools[record.kind].fill(index, record.index, ready)

    def fetch(self, record: Record) -> tuple[int, Task]:
        """Return the buffer with the record's gradient, read from SSD if needed, and the task that fills it."""
        pool = self._pools[record.kind]
        index = pool.find(record.index)
        if index is None:
            index, after = self.take(record)
            ready = self._emit(
                Op.GRADIENT_READ,
                [*after, self._spilled.pop(record.index)],
                record=record.index,
                target=index,
                nbytes=record.gradient_nbytes,
            )
            pool.fill(index, record.index, ready)
        return index, pool.slots[index].filled

    def updated(self, index: int, record: Record, update: Task, *, keep: bool) -> None:
        """Note that ``update`` uses the gradient in buffer ``index``, which is then free unless it is saved."""
        pool = self._pools[record.kind]
        if keep:
            self.speculated[record.index] = update.step
        else:
            pool.drop(record.index)
        pool.use(index, update)

    def resolve_speculation(self, again: bool) -> list[Record]:
        """Return the records whose saved gradients are used ``again``; if not, drop these gradients."""
        saved = self.speculated
        self.speculated = {}
        if again:
            self.pending.update(saved)
            return [self._records[index] for index in saved]
        for index in saved:
            self._spilled.pop(index, None)
            self._pools[self._records[index].kind].drop(index)
        return []

    def _next_use(self, key: Hashable) -> float:
        assert isinstance(key, int)
        if key in self.pending:
            return self._first_use(key)
        if key in self.speculated:  # after all that are sure to be used
            return float(self._first_use(key)) + 1e9
        return NEVER
