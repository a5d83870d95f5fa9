"""Sums over ranks."""
