"""Where a step's time went: how long each resource was busy, and what the device waited for when it was not."""

from dataclasses import dataclass, field

from common.intervals import Interval, merge, total
from fuyou.runtime.data_plane.data_plane import DataPlane
from fuyou.runtime.trace import StepTrace
from fuyou.schedule.tasks import ComputeTask, Op, Resource, StepList, Task


@dataclass(frozen=True)
class StepReport:
    """One finished step."""

    step: int
    loss: float
    grad_norm: float  # Norm of the whole gradient before clipping
    # From the call of the engine to the end of :meth:`Engine.step`; write-back may go on into the next step.
    seconds: float
    tokens: int
    # Time that each resource was busy since the last report: the largest bounds the step.
    bound_seconds: dict[str, float]
    # Time that the device stood idle since the last report, by the kind of task that it waited for.
    idle_seconds: dict[str, float]
    planned_read_bytes: int  # Bytes that the schedule had the SSDs read
    planned_written_bytes: int
    planned_sent_bytes: int = 0  # Bytes that the schedule had this rank send to other nodes
    kept_activation_bytes: int = 0  # Bytes of operator outputs that were saved for the backward pass, in whatever tier
    # Fraction of the recomputation's FLOPs that was left out: saved, or needed by nothing. 0 in a run's first step.
    recomputation_saved: float = 0.0
    skipped: bool = False  # Whether loss or gradient were not finite, and nothing was changed
    clipped: bool = False  # Whether the gradient was scaled down
    aux_loss: float | None = None  # The router loss, not multiplied by its coefficient, where it is a part of the loss
    # Whether updates had been done before it was known that the step is clipped or left out, and are done again.
    updated_again: bool = False
    # When each resource was busy since the last report, (begin, end) in seconds on `time.monotonic`'s clock.
    busy_intervals: dict[str, list[Interval]] = field(default_factory=dict)


@dataclass
class Times:
    """Times of the tasks that have ended since the last look, in seconds."""

    # Seconds that each resource was busy; tasks of one resource that overlap count once.
    busy: dict[str, float] = field(default_factory=dict)
    # Seconds that the device was idle, by the kind of task that it waited for; `caller` is what the caller did in
    # between.
    idle: dict[str, float] = field(default_factory=dict)
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
        states, adam = self._plane.optimizer.take_ssd_intervals(), self._plane.optimizer.take_adam_intervals()
        busy[Resource.SSD] += [(one.started_at, one.finished_at) for one in states]
        busy[Resource.ADAM] += [(one.started_at, one.finished_at) for one in adam]
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
        merged = {resource.value: merge(found) for resource, found in busy.items()}
        return Times({name: total(found) for name, found in merged.items()}, idle, merged)

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
