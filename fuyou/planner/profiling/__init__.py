"""Profiles: what this machine does with a model, measured in seconds (Fuyou, section 4.2), cached for later runs."""

from fuyou.planner.profiling.cache import load, save
from fuyou.planner.profiling.measure import ProfiledWorkload, measure
from fuyou.planner.profiling.profile import OperatorTime, Profile

__all__ = ["OperatorTime", "Profile", "ProfiledWorkload", "load", "measure", "save"]
