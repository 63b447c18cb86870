"""Profiles: rates of this machine with a model, in seconds (Fuyou, section 4.2), cached for later runs."""

from fuyou.planner.profiling.measure import ProfiledWorkload, load, measure, save
from fuyou.planner.rates import OperatorTime, Profile

__all__ = ["OperatorTime", "Profile", "ProfiledWorkload", "load", "measure", "save"]
