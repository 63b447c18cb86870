"""A pool of equal buffers that holds what is needed soonest.

The order of a step's visits is known beforehand, and so is the best policy (Belady, 1966): keep what is needed soonest,
give up what is needed latest. (For a cyclic order LRU would be the worst: it gives up what comes next.) The pool
decides while the schedule is built, not while it runs; the result are tasks and their dependencies.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field

from common.errors import FinetuneError
from fuyou.schedule.tasks import Task

#: Position of a use that never comes.
NEVER = float("inf")


@dataclass
class Slot:
    """A buffer: the object in it, the task that fills it, and the tasks that still use it."""

    key: Hashable | None = None
    ready: Task | None = None
    users: list[Task] = field(default_factory=list)
    last_use: int = 0  # The pool's clock when it was last filled or used

    @property
    def filled(self) -> Task:
        assert self.ready is not None
        return self.ready

    def busy(self) -> list[Task]:
        """Return all tasks that must finish before the buffer may be overwritten."""
        return [*self.users, self.ready] if self.ready is not None else list(self.users)


class Pool:
    """A number of buffers, each of which holds the object named by its key.

    Args:
        next_use: returns the position of an object's next use, or :data:`NEVER`.
        spared: number of newest computations (see :meth:`end_computation`) whose buffers are given away last, that
            of the newest object last of all, because a taker waits for the computation to end and its results to leave.
            0 if only the next use counts.
        announced: whether :meth:`update_next_use` and :meth:`sort_again` follow each change of a next use, so that
            large pools need no search. Otherwise all objects are sorted for each taker.
    """

    def __init__(
        self,
        name: str,
        count: int,
        next_use: Callable[[Hashable], float],
        spared: int = 0,
        announced: bool = False,
    ):
        self.name = name
        self._newest = -1
        # The clock when each of the computations ended that are spared, and the one before: buffers are busy that were
        # used since.
        self._ends = deque([0], maxlen=spared + 1)
        self.slots = [Slot() for _ in range(count)]
        self._next_use = next_use
        self._announced = announced
        # A heap: next use (negative), when last touched, index. Entries that do not hold any more are passed over.
        # None: made when it is needed, which it never is in a pool that holds everything.
        self._sorted: list[tuple[float, int, int]] | None = None
        self._where: dict[Hashable, int] = {}
        self._empty = [(0, index) for index in range(count)]  # a heap: when last touched, index
        self._clock = 0

    def find(self, key: Hashable) -> int | None:
        """Return the index of the buffer that holds ``key``, or None."""
        return self._where.get(key)

    def take(
        self, key: Hashable, pinned: Iterable[Hashable] = (), *, spare_empty: bool = False
    ) -> tuple[int, Hashable | None]:
        """Give a buffer to ``key``; return its index, and the object that has to leave if it is still needed.

        The caller saves the leaving object, makes the new object's first task wait for :meth:`Slot.busy`, and then
        calls :meth:`fill`.

        Args:
            pinned: objects that stay.
            spare_empty: whether, if only busy buffers are empty, an idle object leaves instead.
        """
        pinned = set(pinned)
        empty = self._take_empty()
        evicted: tuple[int, float] | None = None
        if empty is None:
            evicted = self._needed_latest(pinned)
        elif spare_empty and self._sparing(empty):
            evicted = self._needed_latest(pinned, idle=True)
        if empty is not None:
            if evicted is None:
                return empty, None
            heapq.heappush(self._empty, (self.slots[empty].last_use, empty))
        if evicted is None:
            raise FinetuneError(
                f"All {len(self.slots)} buffers of the {self.name} pool are in use; {key} finds none."
            )
        index, use = evicted
        slot = self.slots[index]
        leaving = slot.key
        assert leaving is not None
        del self._where[leaving]
        slot.key = None
        return index, leaving if use != NEVER else None

    def _needed_latest(self, pinned: Collection[Hashable], idle: bool = False) -> tuple[int, float] | None:
        """Return the buffer whose object is needed latest, and the position of that use; None if there is none.

        Ties go to the buffer idle the longest. Objects in ``pinned`` are excluded; spared busy buffers come last, or
        with ``idle`` not at all.
        """
        if self._sorted is None or not self._announced:
            self._sorted = [
                self._entry(index) for index, slot in enumerate(self.slots) if slot.key is not None
            ]
            heapq.heapify(self._sorted)
        best: tuple[int, float] | None = None
        spared: dict[int, tuple[int, float]] = {}
        stay = []
        while self._sorted and best is None:
            entry = heapq.heappop(self._sorted)
            use = -entry[0]
            index = entry[2]
            key = self.slots[index].key
            if key is None:
                continue
            current = self._entry(index)
            if entry != current:
                if entry[0] == current[0]:  # used since it was sorted
                    heapq.heappush(self._sorted, current)
                continue
            sparing = self._sparing(index, use)
            if key not in pinned and not sparing:
                best = index, use
                continue
            stay.append(entry)
            if key not in pinned:
                spared.setdefault(sparing, (index, use))
        for entry in stay:
            heapq.heappush(self._sorted, entry)
        return best if best or idle else spared.get(1) or spared.get(2)

    def _entry(self, index: int) -> tuple[float, int, int]:
        slot = self.slots[index]
        return -self._next_use(slot.key), slot.last_use, index

    def update_next_use(self, key: Hashable) -> None:
        """Note that the next use of ``key``, if it is here, has changed."""
        index = self._where.get(key)
        if index is not None:
            self._sort(index)

    def sort_again(self) -> None:
        """Note that the next uses of many objects have changed."""
        self._sorted = None

    def _sort(self, index: int) -> None:
        if not self._announced or self._sorted is None or self.slots[index].key is None:
            return
        heapq.heappush(self._sorted, self._entry(index))
        if len(self._sorted) > 8 * len(self.slots) + 64:
            self._sorted = None

    def _sparing(self, index: int, use: float = 0.0) -> int:
        """Return how much a buffer with next use ``use`` is spared: 0 not, 1 as busy, 2 as newest."""
        if self._ends.maxlen == 1 or use == NEVER:
            return 0
        return 2 if index == self._newest else int(self.slots[index].last_use > self._ends[0])

    def _take_empty(self) -> int | None:
        while self._empty:
            touched, index = heapq.heappop(self._empty)
            slot = self.slots[index]
            if slot.key is None and slot.last_use == touched:
                return index
            if slot.key is None:  # its last users came after it was emptied
                heapq.heappush(self._empty, (slot.last_use, index))
        return None

    def has_room(self) -> bool:
        return len(self._where) < len(self.slots)

    def fill(self, index: int, key: Hashable, ready: Task) -> None:
        """Assign ``key`` to buffer ``index``, which ``ready`` fills after all earlier users of the buffer."""
        slot = self.slots[index]
        slot.key = key
        slot.ready = ready
        slot.users = []
        self._where[key] = index
        self._newest = index
        self.touch(index)
        self._sort(index)

    def use(self, index: int, task: Task) -> None:
        self.slots[index].users.append(task)
        self.touch(index)

    def drop(self, key: Hashable) -> None:
        """Forget ``key``: its buffer is free once its users have finished."""
        index = self._where.pop(key, None)
        if index is not None:
            slot = self.slots[index]
            slot.key = None
            heapq.heappush(self._empty, (slot.last_use, index))

    def end_computation(self) -> None:
        """End a computation: buffers that it and the next one use count as busy."""
        self._ends.append(self._clock)

    def touch(self, index: int) -> None:
        self._clock += 1
        self.slots[index].last_use = self._clock
