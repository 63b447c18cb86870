"""A trace says when everything happened: lanes have names, nothing overlaps in one, lengths are the tasks' costs."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from fuyou.layout.model_layout import BufferCounts
from fuyou.layout.record import Precision
from fuyou.planner.simulator import Simulator, TaskRates
from fuyou.planner.trace import write_trace
from fuyou.schedule.batch import BatchShape
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Resource
from tests.helpers.step_layouts import step_layout

BF16 = Precision(torch.bfloat16)
RATES = TaskRates(1e8, 2e6, 1e6, 1e6, 2e6, 1e6, commit_seconds=0.003)
LAYERS, MICRO = 5, 3

Lanes = dict[tuple[str, str], list[dict[str, Any]]]


def read(path: Path) -> Lanes:
    """Events by the names of their group and lane; checks what holds for every trace."""
    check_format(path)
    events = json.loads(path.read_text())["traceEvents"]
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lanes: Lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[groups[event["pid"]], names[event["tid"]]].append(event)
        else:
            assert event["ph"] == "M"
    assert len(lanes) == len(names), "every lane that has a name has tasks, and the other way round"
    for lane in lanes.values():
        free = 0
        for event in sorted(lane, key=lambda event: event["ts"]):
            assert event["ts"] >= free, "no two overlap, and none is before the step"
            free = event["ts"] + event["dur"]
    return lanes


def check_format(path: Path) -> None:
    """What ui.perfetto.dev asks of a Chrome trace in JSON (its "Trace Event Format"), which cannot be opened here."""
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] in ("ms", "ns")
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    for event in content["traceEvents"]:
        assert (
            isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        )
        where = event["pid"], event["tid"]
        if event["ph"] == "M":
            arguments = {"process_name": "name", "thread_name": "name"}.get(event["name"], "sort_index")
            assert event["name"].startswith(("process_", "thread_")) and set(event["args"]) == {arguments}
            named.add(where)
        else:
            assert event["ph"] == "X" and event["cat"] and isinstance(event["args"], dict)
            assert isinstance(event["ts"], int) and isinstance(event["dur"], int), "microseconds"
            assert event["ts"] >= 0 and event["dur"] >= 0
            lanes[where].append(event)
    assert lanes.keys() <= named
    assert len({tid for _, tid in lanes}) == len(lanes), "a thread belongs to one process"
    for lane in lanes.values():
        stamps = [event["ts"] for event in lane]
        assert stamps == sorted(stamps)


def length(events: list[dict[str, Any]]) -> float:
    """Seconds of all of them together."""
    return sum(event["dur"] for event in events) / 1e6


def test_a_simulated_step(tmp_path: Path) -> None:
    layout = step_layout(LAYERS, False, BF16)
    scheduler = Scheduler(layout, BufferCounts(device_activations=4, host_activations=3, ssd_activations=40))
    lists = [scheduler.training_step(step, BatchShape(MICRO, 4096, 8)) for step in range(1, 5)]
    simulation = Simulator(layout.records, RATES, 3, 4096).run(lists)
    window = (simulation.step_ends[-2], simulation.step_ends[-1])
    write_trace(tmp_path / "step.json", lists[-2:], layout.records, window, simulation.intervals)
    lanes = read(tmp_path / "step.json")

    (step,) = lanes["steps", "step"]
    assert (step["name"], step["ts"]) == ("step 4", 0)
    assert step["dur"] / 1e6 == pytest.approx(simulation.step_seconds(), abs=1e-6)
    last = lists[-1].tasks
    computed = lanes["computing", "compute"]
    assert len(computed) == (2 * LAYERS + 3) * MICRO
    assert length(computed) == pytest.approx(
        sum(task.flops for task in last) / RATES.flops_per_second, rel=1e-3
    )
    names = [event["name"] for event in computed]
    assert names[0] == "embedding forward, micro-batch 0"
    assert names.index("block 3 backward, micro-batch 2") == MICRO * (LAYERS + 2 + 1) + 2
    uploads = lanes["host to device", "parameter upload"] + lanes["host to device", "activation upload"]
    moved = sum(task.nbytes for task in last if task.op.resource is Resource.HOST_TO_DEVICE)
    assert sum(event["args"]["bytes"] for event in uploads if event["args"]["step"] == 4) == moved
    assert {"block 0", "head"} <= {one["name"] for one in lanes["SSDs", "parameter read"]}
    assert length(lanes["SSDs", "all traffic"]) <= step["dur"] / 1e6
    # A steady state: as much comes in as goes out
    assert length(lanes["SSDs", "all traffic"]) == pytest.approx(
        lists[-1].ssd_read_bytes() / RATES.read_bytes_per_second
        + lists[-1].ssd_written_bytes() / RATES.write_bytes_per_second,
        rel=0.1,
    )
    assert {event["name"] for event in lanes["optimizer", "update"]} >= {f"block {i}" for i in range(LAYERS)}
    with pytest.raises(UserError, match=r"cannot be written to .*missing"):
        write_trace(tmp_path / "missing" / "step.json", lists, layout.records, window, simulation.intervals)
    assert not list(tmp_path.glob("*.tmp"))
