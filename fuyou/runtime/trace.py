"""A step as a Chrome trace, for ui.perfetto.dev: one group of lanes per resource, one lane per kind of task.

A real step and a simulated one are the same list of tasks and give the same lanes. Tasks of one kind run first in,
first out: where several run at once (reads that queue at a drive), each is drawn from the end of the one
before, and how long it has waited is among its arguments. So no two overlap in a lane.

The format is checked by a test, event by event; Perfetto itself, which is a web site, has not been tried.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import replace_file
from common.units import Interval
from fuyou.layout.model_layout import Phase
from fuyou.layout.record import Record
from fuyou.schedule.tasks import Activation, Op, Resource, StepList, Task

# Groups of lanes from top to bottom, and what they are called.
GROUPS = {
    Resource.GPU: "computing",
    Resource.HOST_TO_DEVICE: "host to device",
    Resource.DEVICE_TO_HOST: "device to host",
    Resource.SSD: "SSDs",
    Resource.ADAM: "optimizer",
    Resource.NONE: "steps",
}
# Lanes that are not kinds of task.
STATE_LANE, ADAM_LANE, DRIVE_LANE, STEP_LANE = "states read and written", "Adam computing", "all traffic", "step"
_NOT_DRAWN = (Op.STATE_READ, Op.STEP)  # A state read takes no time; the process's reads have a lane
_ORDER = [STEP_LANE, *(op.label for op in Op), STATE_LANE, DRIVE_LANE, ADAM_LANE]


class RecordInterval(NamedTuple):
    """Time in which the optimizer process worked on a record, in seconds on :func:`time.monotonic`'s clock."""

    record: int
    started_at: float
    finished_at: float


@dataclass(frozen=True)
class Span:
    """A span of time that something took, in seconds on any one clock."""

    resource: Resource
    lane: str
    name: str
    started_at: float
    finished_at: float
    step: int | None = None
    nbytes: int = 0
    flops: float = 0.0


def task_name(task: Task, records: Sequence[Record]) -> str:
    """Return a name like ``block 3 backward, micro-batch 2`` or ``block 3 parameters``; numbers begin with 0."""
    micro = "" if task.micro is None else f", micro-batch {task.micro}"
    if task.visit is not None:
        whose = f"block {task.visit.layer} " if task.visit.phase in (Phase.BLOCK_FORWARD, Phase.BLOCK_BACKWARD) else ""
        return f"{whose}{task.visit.phase.value}{micro}"
    if task.record is None:
        what = "block input or its gradient" if task.activation is Activation.HIDDEN else "kept outputs"
        return (f"step {task.step}" if task.op is Op.COMMIT else what) + micro
    moved = {
        Op.PARAMETER_READ: "parameters",
        Op.PARAMETER_READ_DEVICE: "parameters",
        Op.PARAMETER_UPLOAD: "parameters",
        Op.GRADIENT_DOWNLOAD: "gradient",
        Op.GRADIENT_WRITE: "gradient",
        Op.GRADIENT_READ: "gradient",
        Op.UPDATE: "update",
        Op.STATE_WRITE: "parameters and states",
    }.get(task.op, task.op.label)
    return f"{records[task.record].name} {moved}"


def task_spans(tasks: Iterable[Task], records: Sequence[Record]) -> list[Span]:
    """Return finished tasks as they are drawn."""
    return [
        Span(
            task.op.resource,
            task.op.label,
            task_name(task, records),
            task.started_at,
            task.finished_at,
            task.step,
            0 if task.op is Op.UPDATE else task.nbytes,
            task.flops,
        )
        for task in tasks
        if task.op not in _NOT_DRAWN
    ]


class StepTrace:
    """The record of what happened in the newest step of a run."""

    def __init__(self, records: Sequence[Record]):
        self._records = records
        self._spans: list[Span] = []
        self._ends: list[tuple[int, float]] = []

    def add(self, tasks: Sequence[Task], states: Iterable[RecordInterval], adam: Iterable[RecordInterval]) -> None:
        """Take in finished tasks, and when the optimizer process read or wrote and computed; forget older steps."""
        self._ends += [(task.step, task.finished_at) for task in tasks if task.op is Op.STEP]
        self._ends = sorted(self._ends)[-2:]
        self._spans += task_spans(tasks, self._records)
        for resource, lane, intervals in ((Resource.SSD, STATE_LANE, states), (Resource.ADAM, ADAM_LANE, adam)):
            for span in intervals:
                name = self._records[span.record].name
                self._spans.append(Span(resource, lane, name, span.started_at, span.finished_at))
        since = self._ends[0][1] if len(self._ends) > 1 else float("-inf")
        self._spans = [span for span in self._spans if span.finished_at > since]

    def write(self, path: Path) -> None:
        """Write the newest ended step: from the end of the one before to the last of its tasks.

        Raises:
            UserError: if no step has ended, or ``path`` cannot be written.
        """
        if not self._ends:
            raise UserError(f"No step was taken, so there is nothing to write to {path}.")
        step, end = self._ends[-1]
        begin = self._ends[0][1] if len(self._ends) > 1 else min((span.started_at for span in self._spans), default=end)
        whole = Span(Resource.NONE, STEP_LANE, f"step {step}", begin, end, step)
        write_spans(path, [whole, *self._spans], begin)


def write_trace(
    path: Path,
    lists: Sequence[StepList],
    records: Sequence[Record],
    window: Interval,
    busy: Mapping[Resource, Sequence[Interval]] | None = None,
) -> None:
    """Write a simulated step.

    Args:
        lists: the step and (for what reaches over from it) the one before, simulated.
        window: begin and end of the step on the simulation's clock; what ends before it is left out.
        busy: when the drives and the optimizer worked: :attr:`fuyou.planner.simulator.Simulation.intervals`.

    Raises:
        UserError: if ``path`` cannot be written.
    """
    begin, end = window
    spans = [Span(Resource.NONE, STEP_LANE, f"step {lists[-1].step}", begin, end, lists[-1].step)]
    for tasks in lists:
        spans += task_spans(tasks.tasks, records)
    for resource, lane in ((Resource.SSD, DRIVE_LANE), (Resource.ADAM, ADAM_LANE)):
        for began, ended in (busy or {}).get(resource, ()):
            if began < end:
                spans.append(Span(resource, lane, lane, began, min(ended, end)))
    write_spans(path, spans, begin)


def write_spans(path: Path, spans: Iterable[Span], begin: float) -> None:
    """Write ``spans`` as Chrome trace JSON, with times counted from ``begin``; earlier ones are cut or left out."""
    lanes: dict[tuple[Resource, str], list[Span]] = {}
    for span in spans:
        if span.finished_at > begin:
            lanes.setdefault((span.resource, span.lane), []).append(span)
    order = sorted(lanes, key=lambda lane: (list(GROUPS).index(lane[0]), _ORDER.index(lane[1])))
    events: list[dict[str, Any]] = []
    for number, resource in enumerate(GROUPS):
        if any(lane[0] is resource for lane in order):
            events += _metadata("process", number, 0, GROUPS[resource])
    for thread, (resource, label) in enumerate(order, start=1):
        group = list(GROUPS).index(resource)
        events += _metadata("thread", group, thread, label)
        events += _lane_events(lanes[resource, label], begin, group, thread)
    content = {"traceEvents": events, "displayTimeUnit": "ms"}
    try:
        replace_file(path, json.dumps(content))
    except OSError as error:
        raise UserError(f"The trace cannot be written to {path}: {error.strerror}.") from error


def _metadata(kind: str, group: int, thread: int, label: str) -> list[dict[str, Any]]:
    where = {"ph": "M", "pid": group, "tid": thread}
    return [
        {**where, "name": f"{kind}_name", "args": {"name": label}},
        {**where, "name": f"{kind}_sort_index", "args": {"sort_index": thread or group}},
    ]


def _lane_events(spans: list[Span], begin: float, group: int, thread: int) -> list[dict[str, Any]]:
    events = []
    free = begin
    for span in sorted(spans, key=lambda span: (span.finished_at, span.started_at)):
        start = max(span.started_at, free)
        arguments: dict[str, Any] = {} if span.step is None else {"step": span.step}
        if span.nbytes:
            arguments["bytes"] = span.nbytes
        if span.flops:
            arguments["flops"] = span.flops
        if start > span.started_at:
            arguments["waited_ms"] = round((start - span.started_at) * 1e3, 3)
        # Both ends are rounded, not the length: rounding must not make neighbours overlap.
        at, until = round((start - begin) * 1e6), round((max(start, span.finished_at) - begin) * 1e6)
        events.append(
            {
                "name": span.name,
                "cat": span.lane,
                "ph": "X",
                "pid": group,
                "tid": thread,
                "ts": at,
                "dur": until - at,
                "args": arguments,
            }
        )
        free = max(start, span.finished_at)
    return events
