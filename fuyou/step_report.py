"""What a step cost, resource by resource."""

from dataclasses import dataclass

from fuyou.data_plane import DataPlane
from fuyou.intervals import merge
from fuyou.tasks import Op, Resource, StepList, Task


@dataclass(frozen=True)
class StepReport:
    """One finished step."""

    step: int
    loss: float
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    seconds: float
    """From the call of the engine to the end of :meth:`Engine.step`; write-back may go on into the next step."""
    tokens: int
    bound_seconds: dict[str, float]
    """Time that each resource was busy since the last report: the largest bounds the step."""
    planned_read_bytes: int
    """Bytes that the schedule had the SSDs read."""
    planned_written_bytes: int


class BusyTimes:
    """Adds up when each resource was busy, from the tasks' times. Overlapping tasks of one resource count once."""

    def __init__(self, plane: DataPlane):
        self._plane = plane
        self._watched: list[Task] = []

    def watch(self, tasks: StepList) -> None:
        """Count these tasks once they are finished."""
        # The optimizer process reports its own reads and writes.
        skipped = (Op.STATE_READ, Op.STATE_WRITE)
        self._watched += [
            task for task in tasks.tasks if task.op.resource is not Resource.NONE and task.op not in skipped
        ]

    def take(self) -> dict[str, float]:
        """Busy seconds of each resource, over what has finished since the last call."""
        intervals: dict[Resource, list[tuple[float, float]]] = {
            resource: [] for resource in Resource if resource is not Resource.NONE
        }
        waiting = []
        for task in self._watched:
            if task.done:
                intervals[task.op.resource].append(self._plane.device.interval(task))
            else:
                waiting.append(task)
        self._watched = waiting
        intervals[Resource.SSD] += self._plane.take_ssd_intervals()
        return {
            resource.value: sum(ended - began for began, ended in merge(found)) for resource, found in intervals.items()
        }
