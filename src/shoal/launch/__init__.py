"""Launchers of a run's processes."""
