"""Sequence and context parallelism: positions divided over ranks."""
