"""Other ways to run what is planned that a user should know of before paying for this one."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cli.plan.described import format_days
from cli.report.results import RESOURCES
from common.models.adapters.options import DENSE_LINEAR
from common.units import format_bytes, format_count, format_seconds
from fuyou.layout.record_parts import ParameterSlot
from fuyou.planner import Plan, TrainingJob


@dataclass(frozen=True)
class Alternative:
    """Another plan, to compare with."""

    label: str
    text: str
    how: str  # What to type; empty: no option does it
    plan: Plan | None

    def to_json(self) -> dict[str, Any]:
        names = ("tokens_per_second", "step_seconds", "ssd_written_bytes_per_step", "drive_life_days")
        content = {} if self.plan is None else self.plan.to_json()
        return {"text": self.text, "options": self.how, **{name: content.get(name) for name in names}}


def on_one_node(several: Plan, alone: Plan) -> Alternative | None:
    """Return the plan of one node if it is faster than that of several."""
    if not alone.fits or (
        several.memory is not None and alone.tokens_per_second <= several.tokens_per_second
    ):
        return None
    ranks = alone.job.layout.share.ranks_per_node
    how = f"--nodes 1 --gpus-per-node {ranks}" if ranks > 1 else "no --nodes"
    instead = ""
    if several.memory is not None:
        instead = (
            f" instead of {format_count(several.tokens_per_second)} tokens/s and "
            f"{format_seconds(several.step_seconds)}, bound by {RESOURCES[several.bound.value]}"
        )
    text = (
        f"one node is faster: {format_count(alone.tokens_per_second)} tokens/s, {format_seconds(alone.step_seconds)} "
        f"per step{instead} ({how})"
    )
    return Alternative("nodes", text, how, alone)


def adapts_experts(job: TrainingJob) -> bool:
    return any(_on_experts(_adapters(job)))


def without_experts(result: Plan, other: Plan | None) -> Alternative:
    """Return what adapters on routed experts cost.

    Args:
        other: the plan with adapters on dense layers alone, the default; None: no option gives these.
    """
    slots = list(_adapters(result.job))
    on_experts = _on_experts(slots)
    count = sum(slot.numel for slot in slots)
    costs = [f"{format_count(count)} adapter parameters", *_costs(result)]
    share = f"{format_count(sum(slot.numel for slot in on_experts))} of them on routed experts"
    text = f"{', '.join([costs[0], share, *costs[1:]])}"
    how = ""
    if other is not None:
        how = f"--lora-targets {DENSE_LINEAR}"
        left = sum(slot.numel for slot in _adapters(other.job))
        what = ", ".join([f"{format_count(left)} parameters", *_costs(other)])
        text += f"; without those ({how}): {what if other.fits else ' '.join(other.missing)}"
    return Alternative("experts", text, how, other)


def _costs(plan: Plan) -> Iterator[str]:
    if plan.memory is None:
        return
    yield f"{format_bytes(plan.written_bytes)} written per step"
    if plan.drive_days is not None and math.isfinite(plan.drive_days):
        yield f"{format_days(plan.drive_days)} days of drive life"
    yield f"{format_count(plan.tokens_per_second)} tokens/s"


def _adapters(job: TrainingJob) -> Iterator[ParameterSlot]:
    for record in job.layout.adapters:
        yield from (slot for slot in record.parameters if slot.trained)


def _on_experts(slots: Iterable[ParameterSlot]) -> list[ParameterSlot]:
    return [slot for slot in slots if slot.activity < 1]
