"""Predictions for published measurements, and what they are worth: see docs/planner.md."""
