"""Compilation and activation recomputation of repeated blocks."""
