"""Where a step's time went: busy times of each resource, and bytes moved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from common.units import Interval, merge, total
from fuyou.runtime.data_plane.data_plane import DataPlane
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
    # Bytes that the schedule had this rank send to other nodes
    planned_sent_bytes: int = field(default=0, repr=False)
    saved_activation_bytes: int = field(default=0, repr=False)  # Of saved operator outputs, in any tier
    # Fraction of the recomputation that was left out
    recomputation_saved: float = field(default=0.0, repr=False)
    clipped: bool = False  # Whether the gradient was scaled down
    # The router loss, not multiplied by its coefficient, where it is a part of the loss
    aux_loss: float | None = None
    updated_again: bool = False  # Whether updates ran before the norm was known, and run again

    @property
    def bound_seconds(self) -> dict[str, float]:
        """Seconds that each resource was busy since the last report."""
        return {name: total(intervals) for name, intervals in self.busy_intervals.items()}


class Accounting:
    """Adds up the times of tasks that run in ``plane``."""

    def __init__(self, plane: DataPlane):
        self._plane = plane
        self._watched: list[Task] = []

    def watch(self, tasks: StepList) -> None:
        """Count these tasks once they are finished."""
        self._watched += tasks.tasks

    def take(self) -> dict[str, list[Interval]]:
        """Return when each resource was busy with what has finished since the last call, in seconds."""
        ended = [task.done and self._plane.buffers.device.has_finished(task) for task in self._watched]
        done = [task for task, over in zip(self._watched, ended, strict=True) if over]
        self._watched = [task for task, over in zip(self._watched, ended, strict=True) if not over]
        alone = self._plane.buffers.layout.share.world_size == 1
        absent = {Resource.NONE, *((Resource.INTRA_NODE, Resource.INTER_NODE) if alone else ())}
        busy: dict[Resource, list[Interval]] = {
            resource: [] for resource in Resource if resource not in absent
        }
        for task in done:
            task.started_at, task.finished_at = self._plane.buffers.device.interval(task)
            # The optimizer process reports when it read, computed and wrote: its tasks contain all three.
            if task.op.resource is not Resource.NONE and task.op not in (
                Op.STATE_READ,
                Op.UPDATE,
                Op.STATE_WRITE,
            ):
                busy[task.op.resource].append((task.started_at, task.finished_at))
            task.after = []  # or every task would keep all of its ancestors alive
        states, adam = self._plane.optimizer.take_intervals()
        busy[Resource.SSD] += states
        busy[Resource.ADAM] += adam
        return {resource.value: merge(spans) for resource, spans in busy.items()}


class Bytes(NamedTuple):
    """Bytes moved between SSDs and memory."""

    read: int = 0
    written: int = 0

    def plus(self, other: "Bytes", sign: int = 1) -> "Bytes":
        """Return the sum of both; with a ``sign`` of -1, the difference."""
        return Bytes(self.read + sign * other.read, self.written + sign * other.written)


class IoCounter:
    """Adds up what comes from parts that come and go.

    Args:
        read: all that the parts there are have read and written so far.

    Attributes:
        planned: what :attr:`training` comes to by the schedule, once everything submitted is done.
        other: what was moved while :meth:`not_counted`.
    """

    def __init__(self, read: Callable[[], Bytes]):
        self._read = read
        self._closed = self.other = self.planned = Bytes()

    @property
    def training(self) -> Bytes:
        """What training has moved, in all processes of the engine."""
        return self._all.plus(self.other, -1)

    def submitted(self, tasks: StepList) -> None:
        """Note what ``tasks`` will move."""
        self.planned = self.planned.plus(Bytes(tasks.ssd_read_bytes(), tasks.ssd_written_bytes()))

    def begin(self) -> None:
        """Leave out what has been moved up to now: looking at what there is to continue is not training."""
        self.other = self._all

    def ended(self, moved: Bytes) -> None:
        """Add what a part has moved that has ended."""
        self._closed = self._closed.plus(moved)

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Leave out what is read and written meanwhile: filling the store, exporting, looking."""
        before = self._all
        try:
            yield
        finally:
            self.other = self.other.plus(self._all.plus(before, -1))

    @property
    def _all(self) -> Bytes:
        return self._closed.plus(self._read())
