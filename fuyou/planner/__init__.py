"""Plans before running: whether a run fits, its speed, and its bound. Needs no weights, GPU, or SSD."""

from fuyou.planner.choose_settings import choose_settings
from fuyou.planner.machine import Machine, RankLinks, machine_of_one_rank, preset_machine, profiled_machine
from fuyou.planner.plan import Plan
from fuyou.planner.run_plan import RunPlan, profile_or_measure
from fuyou.planner.search import search
from fuyou.planner.training_job import TrainingJob, describe_training

__all__ = [
    "Machine",
    "Plan",
    "RankLinks",
    "RunPlan",
    "TrainingJob",
    "choose_settings",
    "describe_training",
    "machine_of_one_rank",
    "preset_machine",
    "profile_or_measure",
    "profiled_machine",
    "search",
]
