"""Bytes read from and written to the SSDs: what a run has moved, and what its schedule said it would."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fuyou.schedule.tasks import StepList

#: Bytes read, bytes written.
Bytes = tuple[int, int]


class IoCounter:
    """Adds up what comes from parts that come and go.

    Args:
        read: all that the parts there are have read and written so far.
    """

    def __init__(self, read: Callable[[], Bytes]):
        self._read = read
        self._closed = self._other = (0, 0)
        self.planned: Bytes = (0, 0)
        """What the schedule says that :attr:`training` comes to, once everything submitted is done."""

    @property
    def training(self) -> Bytes:
        """What training has moved, in all our processes."""
        return _minus(self._all, self._other)

    @property
    def other(self) -> Bytes:
        """What was moved while :meth:`not_counted`."""
        return self._other

    def submitted(self, tasks: StepList) -> None:
        """Note what ``tasks`` will move."""
        self.planned = _plus(self.planned, (tasks.ssd_read_bytes(), tasks.ssd_written_bytes()))

    def begin(self) -> None:
        """What has been moved up to now is not training's: looking at what there is to continue."""
        self._other = self._all

    def ended(self, moved: Bytes) -> None:
        """A part has ended, having moved so much: it is not asked any more."""
        self._closed = _plus(self._closed, moved)

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """What is read and written meanwhile is not training's: filling the store, exporting, looking."""
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
