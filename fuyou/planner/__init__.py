"""Plans before running: whether a run fits, how fast it will be, and what bounds it. Needs no weights, GPU or SSD."""

from fuyou.planner.machine import Machine, preset_machine
from fuyou.planner.plan import Plan, plan
from fuyou.planner.workload import Workload, workload

__all__ = ["Machine", "Plan", "Workload", "plan", "preset_machine", "workload"]
