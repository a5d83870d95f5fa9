"""Predictions for published measurements, and what they are worth: see benchmarks/results/published.md."""
