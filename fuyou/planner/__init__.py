"""Plans before running: whether a run fits, how fast it will be, and what bounds it. Needs no weights, GPU or SSD."""

from fuyou.planner.choose import Choice, choose, is_profiled, measured, profile_of, workload_of
from fuyou.planner.machine import Links, Machine, one_of_several, preset_machine, profiled_machine
from fuyou.planner.paper import PaperScheme
from fuyou.planner.plan import Plan, plan
from fuyou.planner.training import Training, training

__all__ = [
    "Choice",
    "Links",
    "Machine",
    "PaperScheme",
    "Plan",
    "Training",
    "choose",
    "is_profiled",
    "measured",
    "one_of_several",
    "plan",
    "preset_machine",
    "profile_of",
    "profiled_machine",
    "training",
    "workload_of",
]
