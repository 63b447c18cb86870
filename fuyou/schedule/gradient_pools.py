"""Gradients in host memory: on their way to their update, deferred, or saved in case the update runs again.

Gradients needed soonest stay; those that must leave for another gradient are written to SSD.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

from fuyou.layout.model_layout import BufferCounts, ModelLayout
from fuyou.layout.record import Kind, Record
from fuyou.schedule.buffer_pool import NEVER, Pool
from fuyou.schedule.tasks import Op, Task


class AddTask(Protocol):
    """Appends a task to the list."""

    def __call__(self, op: Op, after: list[Task], **fields: int | None) -> Task: ...


class GradientPools:
    """Which buffers hold which gradients.

    Args:
        first_use: returns the position of a record's first use in a step, by which its update must be done.
    """

    def __init__(self, shape: ModelLayout, counts: BufferCounts, first_use: Callable[[int], int], emit: AddTask):
        self._records, self._first_use, self._emit = shape.records, first_use, emit
        self._pools = {
            kind: Pool(f"host gradients ({kind.value})", counts.host_gradients(kind), self._next_use) for kind in Kind
        }
        self.pending: dict[int, int] = {}
        """Record -> step of its gradient, which waits for its update."""
        self.kept: dict[int, int] = {}
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
            self.kept[record.index] = update.step
        else:
            pool.drop(record.index)
        pool.use(index, update)

    def resolve_speculation(self, again: bool) -> list[Record]:
        """Return the records whose saved gradients are used ``again``; if not, drop these gradients."""
        saved, self.kept = self.kept, {}
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
        if key in self.kept:  # after all that are sure to be used
            return float(self._first_use(key)) + 1e9
        return NEVER
