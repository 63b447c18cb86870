"""Parameters in host and device memory: what is needed soonest stays, the rest is read again."""

from collections.abc import Callable, Collection, Hashable

from fuyou.layout.model_layout import BufferCounts
from fuyou.layout.record import Kind, Record
from fuyou.schedule.buffer_pool import Pool, SortedPool
from fuyou.schedule.gradient_pools import AddTask
from fuyou.schedule.record_slots import RecordSlots
from fuyou.schedule.tasks import Op, Task


class ParameterPools:
    """Which buffers hold the parameters of which records.

    Args:
        counts: numbers of buffers.
        host: pools of buffers in host memory.
        slots: where records are on SSD.
        next_use: position of a record's next use.
        emit: appends a task to the step's list.
        used_from_host: returns whether something would take a record that is used now from one of so many host
            buffers. What nothing would comes from the SSDs to the device past host memory; None: everything goes there.
    """

    def __init__(
        self,
        counts: BufferCounts,
        host: dict[Kind, SortedPool],
        slots: RecordSlots,
        next_use: Callable[[Hashable], float],
        emit: AddTask,
        used_from_host: Callable[[Record, int], bool] | None = None,
    ):
        self._device = {
            kind: Pool(f"device parameters ({kind.value})", counts.device(kind), next_use, _spared(counts.device(kind)))
            for kind in Kind
        }
        self._host, self._slots, self._emit, self._used_from_host = host, slots, emit, used_from_host

    def begin_pass(self) -> None:
        """Note that positions begin anew: with them, all next uses have changed."""
        for pool in self._host.values():
            pool.sort_anew()

    def begin_visit(self, records: Collection[Record]) -> None:
        """Note that ``records`` are used at this position: their next use is a later one now."""
        for record in records:
            self._host[record.kind].update_next_use(record.index)

    def end_visit(self) -> None:
        """Note that all uses of a visit are known."""
        for pool in self._device.values():
            pool.end_computation()

    def on_device(self, record: Record) -> tuple[int, Task]:
        """Return the device buffer that holds the record's parameters, and the task after which it does."""
        pool = self._device[record.kind]
        index = pool.find(record.index)
        if index is not None:
            return index, pool.slots[index].filled
        index, ready = self._read_to_device(record) if self._passes_host(record) else self._upload(record)
        if record.share.ranks_per_node > 1:
            filled = record.filled_slices[record.share.local_rank]
            nbytes = (record.share.ranks_per_node - 1) * filled * record.unit_bytes
            ready = self._emit(Op.PARAMETER_GATHER, [ready], record=record.index, target=index, nbytes=nbytes)
        pool.fill(index, record.index, ready)
        return index, ready

    def _passes_host(self, record: Record) -> bool:
        """Return whether the record's parameters go past host memory: nobody would take them from there."""
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
        """Return the host buffer that holds the record's newest parameters, and the task after which it does."""
        pool = self._host[record.kind]
        index = pool.find(record.index)
        if index is not None:
            return index, pool.slots[index].filled
        index, _ = pool.take(record.index)
        read = self._read(Op.PARAMETER_READ, record, index, pool.slots[index].busy())
        pool.fill(index, record.index, read)
        return index, read

    def _read(self, op: Op, record: Record, target: int, busy: list[Task]) -> Task:
        """Return the task that reads the record's newest parameters into a buffer, once nobody is busy with that."""
        return self._emit(
            op,
            [*busy, *self._slots.writes[record.index]],
            record=record.index,
            source=self._slots.newest[record.index],
            target=target,
            nbytes=record.parameter_nbytes,
        )

    def use_on_device(self, record: Record, buffer: int, task: Task) -> None:
        """Note that ``task`` uses the record's parameters in a device buffer."""
        self._device[record.kind].use(buffer, task)

    def host_users(self, record: Record, buffer: int) -> list[Task]:
        """Return the tasks that use the record's parameters in a host buffer."""
        return self._host[record.kind].slots[buffer].users

    def update_on_host(self, record: Record, buffer: int, ready: Task) -> None:
        """Note that the host buffer holds new parameters after ``ready``: the device's copy is stale."""
        self._host[record.kind].fill(buffer, record.index, ready)
        self.drop_from_device(record)

    def drop_from_device(self, record: Record) -> None:
        """Forget the device's copy of the record's parameters."""
        self._device[record.kind].drop(record.index)

    def drop_from_host(self, record: Record) -> None:
        """Forget the host's copy of the record's parameters."""
        self._host[record.kind].drop(record.index)


def _spared(buffers: int) -> int:
    """Return how many of the newest visits keep their device buffers, whenever these are needed next.

    Pieces of a block come again in the same order, micro-batch after micro-batch. What is needed latest is then what
    has just been used: given to the next upload, it would have every upload wait for the computation before it. So half
    of several buffers are in turn, for uploads ahead of their use, and the other half keep what is needed soonest.
    """
    return buffers // 2 if buffers > 2 else 0
