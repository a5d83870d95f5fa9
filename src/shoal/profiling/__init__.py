"""Profiling: a model traced without weights, operator by operator, into a `shoal.planner.profile.Profile`."""

from shoal.profiling.jobs import profile_job
from shoal.profiling.profiles import profile

__all__ = ["profile", "profile_job"]
