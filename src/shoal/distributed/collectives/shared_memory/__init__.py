"""Collectives through shared memory of one host."""
