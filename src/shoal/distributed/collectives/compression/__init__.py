"""Gradient compression."""
