"""Diagnosis of a machine, or of a run's lost time."""
