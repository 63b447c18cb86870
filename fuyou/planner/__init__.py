"""Plans before running: whether a run fits, how fast it will be, and what bounds it. Needs no weights, GPU or SSD."""

from fuyou.planner.choose import Choice, choose
from fuyou.planner.context import PlannerContext
from fuyou.planner.machine import Machine, RankLinks, one_of_several, preset_machine, profiled_machine
from fuyou.planner.paper import PaperScheme
from fuyou.planner.run_plan import RunPlan, plan
from fuyou.planner.training import Training, describe_training

__all__ = [
    "Choice",
    "Machine",
    "PaperScheme",
    "PlannerContext",
    "RankLinks",
    "RunPlan",
    "Training",
    "choose",
    "describe_training",
    "one_of_several",
    "plan",
    "preset_machine",
    "profiled_machine",
]
