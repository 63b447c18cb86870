"""Position of the scheduler in a pass through the model, and what comes next."""

import bisect
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

from fuyou.layout.model_layout import Visit
from fuyou.layout.record import Record


class PassPosition:
    """Visits of a pass, and the current one. The same pass is assumed to follow."""

    def __init__(self, records: Sequence[Record], visits: Sequence[Visit]):
        self._records = records
        self._position = 0
        self.visits: Sequence[Visit] = ()
        self._uses: dict[int, list[int]] = {}  # record -> positions of the visits that use it
        self._next: dict[Hashable, int] = {}  # record -> position of its next use
        self.follow(visits)

    def follow(self, visits: Sequence[Visit]) -> None:
        """Replace the visits; the position stays."""
        if visits is self.visits:
            return
        self.visits = visits
        self._uses = {}
        for position, visit in enumerate(visits):
            for record in visit.records:
                self._uses.setdefault(record, []).append(position)
        self._next = {record: self._use_after(record) for record in self._uses}

    def begin(self) -> None:
        self._move(0)

    def end(self) -> None:
        self._move(len(self.visits))

    def in_turn(self) -> Iterator[Visit]:
        """Yield the visits, with the position at each."""
        for position, visit in enumerate(self.visits):
            self._move(position)
            yield visit

    def _move(self, position: int) -> None:
        """Go to ``position``: the next one, or one of another pass."""
        self._position = position
        passed = self.visits[position].records if 0 < position < len(self.visits) else self._uses
        for record in passed:
            self._next[record] = self._use_after(record)

    def first_use(self, record: int) -> int:
        """Return the position of the first visit that uses a record."""
        return self._uses[record][0]

    def next_use(self, record: Hashable) -> float:
        """Return the position of the next visit that uses a record, continuing into the next pass."""
        return self._next[record]

    def _use_after(self, record: int) -> int:
        uses = self._uses[record]
        after = bisect.bisect_right(uses, self._position)
        return uses[after] if after < len(uses) else uses[0] + len(self.visits)

    def used_from_host(self, record: Record, buffers: int) -> bool:
        """Return whether ``record``, which is used now, will be used from one of ``buffers`` host buffers: by its
        update, or again before that many other records.

        A step goes through its blocks and back, so all records between two uses of a block are needed sooner than the
        block: buffers that hold what is needed soonest (Belady, 1966) give it up for them. This is the reuse distance
        of Mattson et al. (1970), which is the same in such an order.
        """
        if record.index in self.visits[self._position].trained:
            return True
        others: set[int] = set()
        following = chain(range(self._position + 1, len(self.visits)), range(self._position + 1))
        for index in (index for number in following for index in self.visits[number].records):
            if index == record.index:
                break
            if self._records[index].kind is record.kind:
                others.add(index)
                if len(others) >= buffers:
                    return False
        return True
