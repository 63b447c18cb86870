"""Profiles: rates of this machine with a model, in seconds (Fuyou, section 4.2), cached for later runs."""

from fuyou.planner.profiling.cache import Profile, ProfiledWorkload, load, save

__all__ = ["Profile", "ProfiledWorkload", "load", "save"]
