"""Where the scheduler is in a pass through the model, and what comes next from there."""

import bisect
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

from fuyou.layout.record import Record
from fuyou.layout.visits import Visit


class PassPosition:
    """The visits of a pass, and which of them is scheduled now. Another pass like it is taken to follow.

    Args:
        records: all of the model.
        visits: of the pass.
    """

    def __init__(self, records: Sequence[Record], visits: Sequence[Visit]):
        self._records = records
        self._position = 0
        self.visits: Sequence[Visit] = ()
        self._uses: dict[int, list[int]] = {}  # record -> positions of the visits that use it
        self.follow(visits)

    def follow(self, visits: Sequence[Visit]) -> None:
        """Let the pass be of ``visits``; the position stays."""
        if visits is self.visits:
            return
        self.visits, self._uses = visits, {}
        for position, visit in enumerate(visits):
            for record in visit.records:
                self._uses.setdefault(record, []).append(position)

    def begin(self) -> None:
        """Be at the first visit."""
        self._position = 0

    def end(self) -> None:
        """Be behind the last visit."""
        self._position = len(self.visits)

    def in_turn(self) -> Iterator[Visit]:
        """Yield the visits, each when the position is its own."""
        for position, visit in enumerate(self.visits):
            self._position = position
            yield visit

    def first_use(self, record: int) -> int:
        """Return the position of the first visit that uses a record."""
        return self._uses[record][0]

    def next_use(self, record: Hashable) -> float:
        """Return the position of the next visit that uses a record, counted on into the next pass."""
        assert isinstance(record, int)
        uses = self._uses[record]
        after = bisect.bisect_right(uses, self._position)
        return uses[after] if after < len(uses) else uses[0] + len(self.visits)

    def used_from_host(self, record: Record, buffers: int) -> bool:
        """Return whether something takes ``record``, which is used now, from host memory: its update, or its next use.

        For its next use it is still there if fewer other records than there are buffers come before that.

        A step goes through its blocks and back: all that comes between two uses of a block is needed sooner again than
        the block itself, so that the buffers which hold what is needed soonest (Belady, 1966) give it up for that. This
        is the reuse distance of Mattson et al. (1970), which is the same in such an order.

        Args:
            record: used by the present visit.
            buffers: number of buffers of its kind.
        """
        if self.visits[self._position].trained == record.index:
            return True
        others: set[int] = set()
        for index in self._used_from_here():
            if index == record.index:
                break
            if self._records[index].kind is record.kind:
                others.add(index)
                if len(others) >= buffers:
                    return False
        return True

    def _used_from_here(self) -> Iterator[int]:
        """Yield the records that are used after the present visit, until its own turn comes again in the next pass."""
        for number in chain(range(self._position + 1, len(self.visits)), range(self._position + 1)):
            yield from self.visits[number].records
