"""Bench: measures the machine it is on, and writes what it found as a cluster file."""
