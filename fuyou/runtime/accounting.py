"""Where a step's time went: busy times of each resource, causes of the device's idle times, and bytes moved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.units import Interval, merge, total
from fuyou.runtime.data_plane.data_plane import DataPlane
from fuyou.runtime.trace import StepTrace
from fuyou.schedule.tasks import ComputeTask, Op, Resource, StepList, Task


@dataclass(frozen=True)
class StepReport:
    """One finished step."""

    step: int
    loss: float
    grad_norm: float  # Norm of the whole gradient before clipping
    seconds: float  # From the call of the engine to the end of :meth:`Engine.step`; write-back may continue
    tokens: int
    bound_seconds: dict[str, float] = field(repr=False)  # Time that each resource was busy since the last report
    idle_seconds: dict[str, float] = field(repr=False)  # Idle time of the device since the last report, by its cause
    planned_read_bytes: int = field(repr=False)  # Bytes that the schedule had the SSDs read
    planned_written_bytes: int = field(repr=False)
    planned_sent_bytes: int = field(default=0, repr=False)  # Bytes that the schedule had this rank send to other nodes
    kept_activation_bytes: int = field(default=0, repr=False)  # Of saved operator outputs, in any tier
    recomputation_saved: float = field(default=0.0, repr=False)  # Fraction of the recomputation that was left out
    skipped: bool = False  # Whether loss or gradient were not finite, and nothing was changed
    clipped: bool = False  # Whether the gradient was scaled down
    aux_loss: float | None = None  # The router loss, not multiplied by its coefficient, where it is a part of the loss
    updated_again: bool = False  # Whether updates ran before the norm was known, and run again
    # When each resource was busy since the last report, (begin, end) in seconds on `time.monotonic`'s clock.
    busy_intervals: dict[str, list[Interval]] = field(default_factory=dict, repr=False)


@dataclass
class Times:
    """Times of the tasks that have ended since the last look, in seconds."""

    busy: dict[str, float] = field(default_factory=dict)  # Seconds that each resource was busy, overlaps merged
    idle: dict[str, float] = field(default_factory=dict)  # Idle seconds of the device, by the task that it waited for
    intervals: dict[str, list[Interval]] = field(default_factory=dict)  # When each resource was busy


class Accounting:
    """Adds up tasks' times.

    Args:
        plane: where the tasks run.
        trace: gets everything that has finished, if somebody wants to see it.
    """

    def __init__(self, plane: DataPlane, trace: StepTrace | None = None):
        self._plane, self._trace = plane, trace
        self._watched: list[Task] = []
        self._computed_until = 0.0

    def watch(self, tasks: StepList) -> None:
        """Count these tasks once they are finished."""
        self._watched += tasks.tasks

    def take(self) -> Times:
        """Return the times of what has finished since the last call."""
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
        busy[Resource.SSD] += [(task.started_at, task.finished_at) for task in states]
        busy[Resource.ADAM] += [(task.started_at, task.finished_at) for task in adam]
        idle: dict[str, float] = {}
        for task in done:
            if isinstance(task, ComputeTask):
                if self._computed_until:
                    self._explain(self._computed_until, task, idle)
                self._computed_until = max(self._computed_until, task.finished_at)
        if self._trace is not None:
            self._trace.add(done, states, adam)
        for task in done:
            task.after = []  # or every task would keep all of its ancestors alive
        merged = {resource.value: merge(spans) for resource, spans in busy.items()}
        return Times({name: total(spans) for name, spans in merged.items()}, idle, merged)

    @staticmethod
    def _explain(since: float, task: Task, idle: dict[str, float]) -> None:
        """Say what filled the gap from ``since`` to the begin of ``task``: the last of what it waited for, what that
        had waited for, and so on."""
        until = task.started_at
        while until > since:
            last = max(
                (earlier for earlier in task.after if earlier.done), key=lambda one: one.finished_at, default=None
            )
            if last is None or last.finished_at <= since:
                idle["caller"] = idle.get("caller", 0.0) + until - since
                return
            label = last.op.label
            if last.finished_at < until:  # free to go, and not gone: launching, waking up, the caller's own code
                idle["caller"] = idle.get("caller", 0.0) + until - last.finished_at
            idle[label] = idle.get(label, 0.0) + min(until, last.finished_at) - max(since, min(until, last.started_at))
            until, task = max(since, min(until, last.started_at)), last


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
