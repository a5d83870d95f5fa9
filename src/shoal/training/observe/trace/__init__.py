"""Traces of steps for verification: format, recorder and replay."""
