"""Where a step's time went: busy times of each resource, and bytes moved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.units import Interval, merge, total
from fuyou.runtime.data_plane.data_plane import DataPlane
from fuyou.runtime.trace import StepTrace
from fuyou.schedule.tasks import Op, Resource, StepList, Task


@dataclass(frozen=True)
class StepReport:
    """One finished step."""

    step: int
    loss: float
    grad_norm: float  # Norm of the whole gradient before clipping
    seconds: float  # From the call of the engine to the end of :meth:`Engine.step`; write-back may continue
    tokens: int
    # When each resource was busy since the last report, (begin, end) in seconds on `time.monotonic`'s clock.
    busy_intervals: dict[str, list[Interval]] = field(repr=False)
    planned_read_bytes: int = field(repr=False)  # Bytes that the schedule had the SSDs read
    planned_written_bytes: int = field(repr=False)
    planned_sent_bytes: int = field(default=0, repr=False)  # Bytes that the schedule had this rank send to other nodes
    kept_activation_bytes: int = field(default=0, repr=False)  # Of saved operator outputs, in any tier
    recomputation_saved: float = field(default=0.0, repr=False)  # Fraction of the recomputation that was left out
    clipped: bool = False  # Whether the gradient was scaled down
    aux_loss: float | None = None  # The router loss, not multiplied by its coefficient, where it is a part of the loss
    updated_again: bool = False  # Whether updates ran before the norm was known, and run again

    @property
    def bound_seconds(self) -> dict[str, float]:
        """Seconds that each resource was busy since the last report."""
        return {name: total(intervals) for name, intervals in self.busy_intervals.items()}


class Accounting:
    """Adds up tasks' times.

    Args:
        plane: where the tasks run.
        trace: gets everything that has finished, if somebody wants to see it.
    """

    def __init__(self, plane: DataPlane, trace: StepTrace | None = None):
        self._plane, self._trace = plane, trace
        self._watched: list[Task] = []

    def watch(self, tasks: StepList) -> None:
        """Count these tasks once they are finished."""
        self._watched += tasks.tasks

    def take(self) -> dict[str, list[Interval]]:
        """Return when each resource was busy with what has finished since the last call, in seconds."""
        ended = [task.done and self._plane.buffers.device.has_finished(task) for task in self._watched]
        done = [task for task, over in zip(self._watched, ended, strict=True) if over]
        self._watched = [task for task, over in zip(self._watched, ended, strict=True) if not over]
        alone = self._plane.buffers.shape.share.world_size == 1
        absent = {Resource.NONE, *((Resource.INTRA_NODE, Resource.INTER_NODE) if alone else ())}
        busy: dict[Resource, list[Interval]] = {resource: [] for resource in Resource if resource not in absent}
        for task in done:
            task.started_at, task.finished_at = self._plane.buffers.device.interval(task)
            # The optimizer process reports when it read, computed and wrote: its tasks contain all three.
            if task.op.resource is not Resource.NONE and task.op not in (Op.STATE_READ, Op.UPDATE, Op.STATE_WRITE):
                busy[task.op.resource].append((task.started_at, task.finished_at))
        states, adam = self._plane.optimizer.take_intervals()
        busy[Resource.SSD] += [(begin, end) for _, begin, end in states]
        busy[Resource.ADAM] += [(begin, end) for _, begin, end in adam]
        if self._trace is not None:
            self._trace.add(done, states, adam)
        for task in done:
            task.after = []  # or every task would keep all of its ancestors alive
        return {resource.value: merge(spans) for resource, spans in busy.items()}


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
        """Add what a part has moved that has ended."""
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
