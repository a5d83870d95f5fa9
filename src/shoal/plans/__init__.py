"""Parallel execution plans as values: no torch, no processes."""

from shoal.plans.plan import AXES, DEGREES, Coordinate, Layout, Plan

__all__ = ["AXES", "DEGREES", "Coordinate", "Layout", "Plan"]
