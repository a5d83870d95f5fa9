"""Parallel execution plans as values: no torch, no processes."""

from shoal.plans.layout import AXES, Coordinate, Layout
from shoal.plans.plan import Plan

__all__ = ["AXES", "Coordinate", "Layout", "Plan"]
