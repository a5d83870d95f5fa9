"""Profiles: a model traced without weights, operator by operator, into a `shoal.planner.profile.values.Profile`."""
