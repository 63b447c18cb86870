"""Bytes read from and written to the SSDs: what a run has moved, and what its schedule said it would."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fuyou.schedule.tasks import StepList

Bytes = tuple[int, int]  # Bytes read, bytes written


class IoCounter:
    """Adds up what comes from parts that come and go.

    Args:
        read: all that the parts there are have read and written so far.
    """

    def __init__(self, read: Callable[[], Bytes]):
        self._read = read
        self._closed = self._other = (0, 0)
        self.planned: Bytes = (0, 0)
        """Bytes that :attr:`training` comes to by the schedule, once everything submitted is done."""

    @property
    def training(self) -> Bytes:
        """Bytes that training has moved, in all processes of the engine."""
        return _minus(self._all, self._other)

    @property
    def other(self) -> Bytes:
        """Bytes that were moved while :meth:`not_counted`."""
        return self._other

    def submitted(self, tasks: StepList) -> None:
        """Note what ``tasks`` will move."""
        self.planned = _plus(self.planned, (tasks.ssd_read_bytes(), tasks.ssd_written_bytes()))

    def begin(self) -> None:
        """Leave out what has been moved up to now: looking at what there is to continue is not training."""
        self._other = self._all

    def ended(self, moved: Bytes) -> None:
        """Add what a part has moved that has ended, and is not asked any more."""
        self._closed = _plus(self._closed, moved)

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Leave out what is read and written meanwhile: filling the store, exporting, looking."""
        before = self._all
        try:
            yield
        finally:
            self._other = _plus(self._other, _minus(self._all, before))

    @property
    def _all(self) -> Bytes:
        return _plus(self._closed, self._read())


def _plus(one: Bytes, other: Bytes) -> Bytes:
    return one[0] + other[0], one[1] + other[1]


def _minus(one: Bytes, other: Bytes) -> Bytes:
    return one[0] - other[0], one[1] - other[1]
