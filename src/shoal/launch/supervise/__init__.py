"""Supervision of child processes: their start, their output, their heartbeat, their end, and what follows it."""
