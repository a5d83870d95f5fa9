"""Benchmarks: each file opens with its claim and the command that repeats it, side by side with its peer in one run."""
