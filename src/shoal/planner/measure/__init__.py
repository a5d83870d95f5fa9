"""Benchmarks of this machine for `shoal bench`, written as a cluster file."""
