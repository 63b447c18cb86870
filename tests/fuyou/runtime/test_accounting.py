"""Busy times count overlaps once, and finished tasks let go of their ancestors."""

from types import SimpleNamespace

import pytest

from common.units import total
from fuyou.layout.model_layout import Phase, Visit
from fuyou.layout.share import Share
from fuyou.runtime.accounting import Accounting
from fuyou.runtime.device import Device
from fuyou.schedule.tasks import ComputeTask, Op, StepList, Task


def done(op: Op, after: list[Task], began: float, ended: float) -> Task:
    task = (
        ComputeTask(op, after, visit=Visit(Phase.HEAD, 0, 2), micro=0)
        if op is Op.COMPUTE
        else Task(op, after)
    )
    task.done, task.started_at, task.finished_at = True, began, ended
    return task


def test_busy_times_and_ancestors() -> None:
    first = done(Op.COMPUTE, [], 10.0, 10.5)
    read = done(Op.PARAMETER_READ, [], 10.2, 11.0)
    upload = done(Op.PARAMETER_UPLOAD, [read], 11.0, 11.5)
    early = done(Op.GRADIENT_DOWNLOAD, [first], 10.5, 10.6)
    second = done(Op.COMPUTE, [upload, early], 11.6, 12.0)
    assert isinstance(second, ComputeTask)
    second.saved = 0
    late = done(Op.COMPUTE, [second], 0.0, 0.0)
    late.done = False
    plane = SimpleNamespace(
        buffers=SimpleNamespace(device=Device(), layout=SimpleNamespace(share=Share())),
        optimizer=SimpleNamespace(take_intervals=lambda: ([(10.5, 11.25)], [(1.0, 3.0)])),
    )
    accounting = Accounting(plane)  # type: ignore[arg-type]
    accounting.watch(StepList(1, [first, read, upload, early, second, late]))
    busy = {name: total(intervals) for name, intervals in accounting.take().items()}
    assert busy["gpu"] == pytest.approx(0.9)
    assert busy["ssd"] == pytest.approx(1.05)  # 10.2 to 11.25, counted once
    assert busy["adam"] == 2.0
    assert not any(task.after for task in (first, read, upload, early, second))
    assert late.after == [second]
    late.done, late.started_at, late.finished_at = True, 12.0, 13.0
    assert accounting.take()["gpu"] == [(12.0, 13.0)]
