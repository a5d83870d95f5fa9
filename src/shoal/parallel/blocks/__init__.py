"""Repeated blocks compiled or recomputed."""
