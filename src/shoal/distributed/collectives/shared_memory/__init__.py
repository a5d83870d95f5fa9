"""Collectives through memory that the ranks of one host share."""
