"""Simulated steps of a model without a machine."""

from dataclasses import replace

import torch

from fuyou.layout.model_layout import BufferCounts, interleaved
from fuyou.layout.record import Precision
from fuyou.planner.simulator import Simulation, Simulator, TaskRates
from fuyou.schedule.batch import BatchShape
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import StepList
from tests.helpers.step_layouts import step_layout

BF16 = Precision(torch.bfloat16)
LAYERS, CHUNK = 16, 4096
FAST = TaskRates(1e18, 1e18, 1e18, 1e18, 1e18, 1e18, commit_seconds=0.0)
COUNTS = BufferCounts(device_activations=40, host_blocks=3)


def run(
    rates: TaskRates,
    deferred: float = 0.0,
    micro: int = 2,
    ring: int = 3,
    *,
    direct: bool = False,
    **more: int,
) -> tuple[Simulation, list[StepList]]:
    layout = step_layout(LAYERS, False, BF16)
    counts = replace(COUNTS, **{"host_block_gradients": 2 + len(interleaved(layout, deferred)), **more})
    scheduler = Scheduler(layout, counts, deferred=interleaved(layout, deferred), direct_reads=direct)
    lists = [scheduler.training_step(step, BatchShape(micro, 4096, 8)) for step in range(1, 7)]
    return Simulator(layout.records, rates, ring, CHUNK).run(lists), lists
