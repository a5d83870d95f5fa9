"""Traces of steps for verification: logical values, their recorder, and their replay."""
