"""What this machine does with this model, measured in a few seconds (Fuyou, section 4.2) and kept for the next run."""

from fuyou.planner.profiling.cache import load, save
from fuyou.planner.profiling.measure import ProfiledWorkload, measure
from fuyou.planner.profiling.profile import OperatorTime, Profile

__all__ = ["OperatorTime", "Profile", "ProfiledWorkload", "load", "measure", "save"]
