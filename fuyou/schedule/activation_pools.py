"""Activations on their way through the tiers: those needed soonest are nearest to the device."""

from collections.abc import Callable, Hashable, Iterator, Sequence

from fuyou.layout.model_layout import Phase, Visit
from fuyou.schedule.batch import BatchShape
from fuyou.schedule.buffer_pool import NEVER, Pool
from fuyou.schedule.tasks import Activation, Op, StepList, Task

#: ("x", i, m): input of block i (output of block i - 1, or of the embedding if i is 0) for micro-batch m;
#: ("d", i, m): the gradient of the loss with respect to it; ("k", i, m): saved outputs of operators in block i, or its
#: keys and values of row m.
ActivationKey = tuple[str, int, int]
#: Activations that one compute task reads, and those that it writes.
Arguments = tuple[list[ActivationKey], list[ActivationKey]]


def hidden_arguments(visit: Visit, micro: int) -> Arguments:
    """Return which block inputs and gradients a compute task reads and writes. The head counts as layer L.

    Of a block in pieces, the first part reads them and copies them for the others; the last part writes.
    """
    reads, writes = _all_arguments(visit, micro)
    return reads if visit.begins else [], writes if visit.ends else []


def _all_arguments(visit: Visit, micro: int) -> Arguments:
    i = 0 if visit.layer is None else visit.layer  # an embedding gives block 0 its input
    match visit.phase:
        case Phase.EMBED_FORWARD:
            return [], [("x", 0, micro)]
        case Phase.BLOCK_FORWARD:
            return [("x", i, micro)], [("x", i + 1, micro)]
        case Phase.HEAD:
            return [("x", i, micro)], [("d", i, micro)] if visit.passes_on else []
        case Phase.HEAD_EVAL:
            return [("x", i, micro)], []
        case Phase.BLOCK_BACKWARD:
            return [("x", i, micro), ("d", i + 1, micro)], [("d", i, micro)] if visit.passes_on else []
        case Phase.EMBED_BACKWARD:
            return [("d", 0, micro)], []


class ActivationPools:
    """Activations of one kind on the device, in host memory, and on SSD.

    Args:
        arguments: returns which of these activations a compute task reads and writes.
    """

    def __init__(
        self,
        activation: Activation,
        device: int,
        host: int,
        ssd: int,
        arguments: Callable[[Visit, int], Arguments],
    ):
        self._activation = activation
        self._arguments = arguments
        self._device, self._host = (
            Pool(f"{tier} activations ({activation.value})", count, self._next_use, spared=1, announced=True)
            for tier, count in (("device", device), ("host", host))
        )
        self._ssd_free = list(range(ssd))
        self._ssd: dict[Hashable, tuple[int, Task]] = {}
        self._visits: Sequence[Visit] = ()
        self._batch: BatchShape | None = None
        self._arguments_in_turn: list[Arguments] = []  # Of each compute task of a pass
        # Compute tasks that read each activation, last first
        self._positions: dict[ActivationKey, list[int]] = {}
        self._uses: dict[ActivationKey, list[int]] = {}  # The same for what is left of the pass
        self.arguments: Iterator[Arguments] = iter(())
        """Arguments of the pass's compute tasks, in order."""
        self._list = StepList(0)
        self._bytes = 0
        self._ssd_users: dict[int, list[Task]] = {}

    def begin(self, step: StepList, visits: Sequence[Visit], batch: BatchShape, nbytes: int) -> None:
        """Start a pass, with no activation alive and every use known; each takes ``nbytes``."""
        if visits is not self._visits or batch != self._batch:
            self._visits = visits
            self._batch = batch
            self._arguments_in_turn = [
                self._arguments(visit, micro) for visit in visits for micro in batch.micro_batches_of(visit)
            ]
            self._positions = {}
            for position, (inputs, _) in reversed([*enumerate(self._arguments_in_turn)]):
                for key in inputs:
                    self._positions.setdefault(key, []).append(position)
        self._list = step
        self._bytes = nbytes
        self._uses = {key: positions.copy() for key, positions in self._positions.items()}
        self.arguments = iter(self._arguments_in_turn)

    def fetch(self, key: ActivationKey, pinned: list[ActivationKey], task: Task) -> int:
        """Return the device buffer that will hold ``key`` when ``task`` starts."""
        index = self._device.find(key)
        if index is None:
            source = self._on_host(key)
            index, after = self._room_on_device(key, pinned)
            after = [self._host.slots[source].filled, *after]
            upload = self._emit(Op.ACTIVATION_UPLOAD, after, source=source, target=index, micro=key[2])
            self._host.use(source, upload)
            self._device.fill(index, key, upload)
        task.after.append(self._device.slots[index].filled)
        self._device.use(index, task)
        return index

    def produce(self, key: ActivationKey, pinned: list[ActivationKey], task: Task) -> int:
        """Return a free device buffer for ``key``, which ``task`` writes."""
        index, after = self._room_on_device(key, pinned)
        task.after.extend(after)
        self._device.fill(index, key, task)
        return index

    def rewrite(self, key: ActivationKey, task: Task) -> None:
        """Let ``task``, which has fetched ``key``, write a further part of it."""
        index = self._device.find(key)
        assert index is not None
        self._device.fill(index, key, task)

    def release(self, keys: list[ActivationKey]) -> None:
        """End one use of each of ``keys``, and drop those without further uses."""
        self._device.end_computation()
        self._host.end_computation()
        for key in keys:
            uses = self._uses[key]
            uses.pop()
            if uses:
                self._device.update_next_use(key)
                self._host.update_next_use(key)
            else:
                self._device.drop(key)
                self._host.drop(key)
                self._forget_ssd(key)

    def _room_on_device(self, key: ActivationKey, pinned: list[ActivationKey]) -> tuple[int, list[Task]]:
        """Return a device buffer for ``key``, and the tasks after which it may be overwritten."""
        index, leaving = self._device.take(
            key, pinned, spare_empty=self._host.has_room() or bool(self._ssd_free)
        )
        slot = self._device.slots[index]
        after = slot.busy()
        if leaving is None or self._host.find(leaving) is not None or leaving in self._ssd:
            return index, after
        target, room = self._room_on_host(leaving, key)
        download = self._emit(Op.ACTIVATION_DOWNLOAD, [slot.filled, *room], source=index, target=target)
        self._host.fill(target, leaving, download)
        after.append(download)
        return index, after

    def _room_on_host(self, key: Hashable, keep: Hashable = None) -> tuple[int, list[Task]]:
        """Return a host buffer for ``key`` other than that of ``keep``, and the tasks after which it may be
        overwritten."""
        if not (self._ssd_free or self._host.has_room()):
            self._drop_copy(keep)
        index, leaving = self._host.take(key, [keep])
        slot = self._host.slots[index]
        after = slot.busy()
        if leaving is not None and leaving not in self._ssd and self._device.find(leaving) is None:
            after.append(self._write(leaving, index, slot.filled))
        return index, after

    def _write(self, key: Hashable, source: int, ready: Task) -> Task:
        index = self._ssd_free.pop()
        after = [ready, *self._ssd_users.pop(index, [])]
        write = self._emit(Op.ACTIVATION_WRITE, after, source=source, target=index)
        self._ssd[key] = (index, write)
        return write

    def _drop_copy(self, keep: Hashable) -> None:
        """Empty the host buffer needed latest among copies of what is on the device, except that of ``keep``."""
        there = (slot.key for slot in self._device.slots if slot.key is not None and slot.key != keep)
        copies = [key for key in there if self._host.find(key) is not None]
        if copies:
            self._host.drop(max(copies, key=self._next_use))

    def _on_host(self, key: ActivationKey) -> int:
        index = self._host.find(key)
        if index is None:
            extent, write = self._ssd[key]
            index, after = self._room_on_host(key)
            read = self._emit(Op.ACTIVATION_READ, [write, *after], source=extent, target=index, micro=key[2])
            self._ssd_users.setdefault(extent, []).append(read)
            self._host.fill(index, key, read)
        return index

    def _forget_ssd(self, key: Hashable) -> None:
        entry = self._ssd.pop(key, None)
        if entry is not None:
            index, write = entry
            self._ssd_users.setdefault(index, []).append(write)
            self._ssd_free.insert(0, index)

    def _emit(self, op: Op, after: list[Task], **fields: int) -> Task:
        task = Task(
            op,
            after,
            step=self._list.step,
            nbytes=self._bytes,
            activation=self._activation,
            **fields,  # type: ignore[arg-type]
        )
        self._list.tasks.append(task)
        return task

    def _next_use(self, key: Hashable) -> float:
        uses = self._uses.get(key)  # type: ignore[call-overload]  # pools know keys as hashable objects
        return uses[-1] if uses else NEVER
