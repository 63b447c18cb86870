"""Slots on SSD: where the newest state of each record is, which tasks write it, and what a commit makes valid."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Kind
from fuyou.schedule.buffer_pool import Pool
from fuyou.schedule.gradient_pools import AddTask
from fuyou.schedule.tasks import Op, Task


@dataclass(frozen=True)
class UpdatedRecord:
    """A record in host memory after its update."""

    index: int  # Index of the record
    update: Task
    # Task after which the parameters that other nodes have updated are there, too; `update` if there are none.
    ready: Task
    host: int  # Host buffer of its parameters


class RecordSlots:
    """The slots that records are read from and written to. A commit makes the newest state of all records valid.

    Args:
        shape: the model's records.
        slot: the slot that holds the last committed state. (Frozen records have no other than the first.)
        single: whether each record has one slot instead of two.
        host: pools of parameters in host memory.
        emit: appends a task to the step's list.

    Attributes:
        newest: by record, the slot that its newest state is in, or will be when its writes are done.
        writes: by record, the newest tasks that write it.
        commit: the newest commit, if there has been one.
    """

    def __init__(self, shape: ModelLayout, slot: int, single: bool, host: Mapping[Kind, Pool], emit: AddTask):
        self._shape, self._single, self._host, self._emit = shape, single, host, emit
        self._committed = slot
        self._unwritten: dict[int, UpdatedRecord] = {}  # resident records that are newer than on SSD
        self.newest = [slot if record.trainable else 0 for record in shape.records]
        self.writes: list[list[Task]] = [[] for _ in shape.records]
        self.commit: Task | None = None

    def target(self, index: int) -> int:
        """Return the slot that the record is written to next."""
        return self.newest[index] if self._single else 1 - self._committed

    def revert(self, index: int) -> None:
        """Let the record be again what the committed slot holds."""
        self.newest[index] = self._committed

    def write(self, updated: UpdatedRecord) -> None:
        """Write the record's parameters and states."""
        self._unwritten.pop(updated.index, None)
        self._write(Op.STATE_WRITE, updated)

    def leave_unwritten(self, updated: UpdatedRecord) -> None:
        """Note that a resident record is not written until a later update of it, or a commit."""
        self._unwritten[updated.index] = updated

    def commit_step(self, step: int, ended: Task | None) -> None:
        """Commit ``step`` when all writes are done and the caller has ``ended`` it."""
        for updated in self._unwritten.values():  # not meant to be committed, and is
            self._write(Op.RESIDENT_WRITE, updated)
        self._unwritten.clear()
        after = list(itertools.chain.from_iterable(self.writes))
        after += [task for task in (ended, self.commit) if task is not None]
        self._committed = self.newest[self._shape.trainable[0]]
        self.commit = self._emit(Op.COMMIT, after, target=self._committed)
        self.commit.step = step

    def _write(self, op: Op, updated: UpdatedRecord) -> None:
        record, together = self._shape.records[updated.index], updated.ready is updated.update
        target = self.target(updated.index)
        fields = {"record": updated.index, "source": updated.host, "target": target}
        nbytes = record.state_nbytes + (record.parameter_nbytes if together else 0)
        writes = [self._emit(op, [updated.update], nbytes=nbytes, **fields)]
        if not together:
            writes.append(self._emit(Op.PARAMETER_WRITE, [updated.ready], nbytes=record.parameter_nbytes, **fields))
        for write in writes:
            self._host[record.kind].use(updated.host, write)
        self.writes[updated.index] = writes
        self.newest[updated.index] = target
