"""Profiles: rates of this machine with a model, in seconds (Fuyou, section 4.2), cached for later runs."""

from fuyou.planner.profiling.measure import ProfiledWorkload, WriteWatch, load, measure, save
from fuyou.planner.rates import OperatorTime, Profile

__all__ = ["OperatorTime", "Profile", "ProfiledWorkload", "WriteWatch", "load", "measure", "save"]
