"""A planned step as a Chrome trace, for ui.perfetto.dev: one group of lanes per resource, one lane per kind of task.

A run has the same list of tasks. Tasks of one kind run first in, first out: where several run at once (reads that
queue at a drive), each is drawn from the end of the one before, so that no two overlap in a lane.

The format is checked by a test, event by event; Perfetto itself, which is a web site, has not been tried.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import replace_file
from common.units import Interval
from fuyou.layout.model_layout import Phase
from fuyou.layout.record import Record
from fuyou.schedule.tasks import Op, Resource, StepList, Task

# Groups of lanes from top to bottom, and what they are called.
GROUPS = {
    Resource.GPU: "computing",
    Resource.HOST_TO_DEVICE: "host to device",
    Resource.DEVICE_TO_HOST: "device to host",
    Resource.INTRA_NODE: "between ranks of the node",
    Resource.INTER_NODE: "between nodes",
    Resource.SSD: "SSDs",
    Resource.ADAM: "optimizer",
    Resource.NONE: "steps",
}
# Lanes that are not kinds of task.
ADAM_LANE = "Adam computing"
DRIVE_LANE = "all traffic"
STEP_LANE = "step"
_NOT_DRAWN = (Op.STATE_READ, Op.STEP)  # They take no time


class Span(NamedTuple):
    """A span of time that something took, in seconds on any one clock."""

    resource: Resource
    lane: str
    name: str
    started_at: float
    finished_at: float
    arguments: Mapping[str, float] = {}


def _name(task: Task, records: Sequence[Record]) -> str:
    """Return a name like ``block 3 backward, micro-batch 2``; numbers begin with 0."""
    micro = "" if task.micro is None else f", micro-batch {task.micro}"
    if task.visit is not None:
        whose = (
            f"block {task.visit.layer} "
            if task.visit.phase in (Phase.BLOCK_FORWARD, Phase.BLOCK_BACKWARD)
            else ""
        )
        return f"{whose}{task.visit.phase.value}{micro}"
    if task.record is not None:
        return records[task.record].name
    return f"step {task.step}" if task.op is Op.COMMIT else f"{task.activation.value}{micro}"


def _task_spans(tasks: Iterable[Task], records: Sequence[Record]) -> list[Span]:
    spans = []
    for task in tasks:
        if task.op not in _NOT_DRAWN:
            moved = {} if task.op is Op.UPDATE or not task.nbytes else {"bytes": task.nbytes}
            arguments = {"step": task.step, **moved, **({"flops": task.flops} if task.flops else {})}
            lane = task.op.resource, task.op.label
            spans.append(Span(*lane, _name(task, records), task.started_at, task.finished_at, arguments))
    return spans


def write_trace(
    path: Path,
    lists: Sequence[StepList],
    records: Sequence[Record],
    window: Interval,
    busy: Mapping[Resource, Sequence[Interval]],
) -> None:
    """Write a simulated step.

    Args:
        lists: the step and (for what reaches over from it) the one before, simulated.
        window: begin and end of the step on the simulation's clock; what ends before it is left out.
        busy: when the drives and the optimizer worked: :attr:`fuyou.planner.simulator.Simulation.intervals`.

    Raises:
        UserError: if ``path`` cannot be written.
    """
    spans = [span for tasks in lists for span in _task_spans(tasks.tasks, records)]
    for resource, lane in ((Resource.SSD, DRIVE_LANE), (Resource.ADAM, ADAM_LANE)):
        times = [
            (began, min(ended, window[1])) for began, ended in busy.get(resource, ()) if began < window[1]
        ]
        spans += [Span(resource, lane, lane, *interval) for interval in times]
    _write(path, lists[-1].step, window, spans)


def _write(path: Path, step: int, window: Interval, spans: Sequence[Span]) -> None:
    """Write Chrome trace JSON with times counted from the window's begin; earlier spans are cut or left out."""
    whole = Span(Resource.NONE, STEP_LANE, f"step {step}", *window, {"step": step})
    lanes: dict[tuple[Resource, str], list[Span]] = {}
    for span in (whole, *spans):
        if span.finished_at > window[0]:
            lanes.setdefault((span.resource, span.lane), []).append(span)
    events: list[dict[str, Any]] = []
    thread = 0
    for group, resource in enumerate(GROUPS):
        inside = {lane: drawn for (where, lane), drawn in lanes.items() if where is resource}
        if inside:
            events += _metadata("process", GROUPS[resource], group, 0, group)
        for lane, drawn in inside.items():
            thread += 1
            events += _metadata("thread", lane, group, thread, thread)
            events += _lane_events(drawn, window[0], group, thread)
    try:
        replace_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise UserError(f"The trace cannot be written to {path}: {error.strerror}.") from error


def _metadata(kind: str, name: str, group: int, thread: int, order: int) -> list[dict[str, Any]]:
    where = {"ph": "M", "pid": group, "tid": thread}
    return [
        {**where, "name": f"{kind}_name", "args": {"name": name}},
        {**where, "name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]


def _lane_events(spans: list[Span], begin: float, group: int, thread: int) -> list[dict[str, Any]]:
    events = []
    where = {"ph": "X", "pid": group, "tid": thread}
    free = begin
    for span in sorted(spans, key=lambda span: (span.finished_at, span.started_at)):
        start = max(span.started_at, free)
        free = max(span.started_at, free, span.finished_at)
        # Both ends are rounded, not the length: rounding must not make neighbors overlap.
        at = round((start - begin) * 1e6)
        until = round((free - begin) * 1e6)
        events.append(
            {
                **where,
                "name": span.name,
                "cat": span.lane,
                "ts": at,
                "dur": until - at,
                "args": dict(span.arguments),
            }
        )
    return events
