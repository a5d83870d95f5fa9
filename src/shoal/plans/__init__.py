"""Parallel execution plans as values: no torch, no processes."""

from shoal.plans.plan import AXES, Coordinate, Layout, Plan

__all__ = ["AXES", "Coordinate", "Layout", "Plan"]
