"""How a job is laid out over devices: values only, no torch, no processes."""

from shoal.plan.layout import AXES, Coordinate, Layout
from shoal.plan.plan import Plan

__all__ = ["AXES", "Coordinate", "Layout", "Plan"]
