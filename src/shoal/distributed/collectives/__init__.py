"""Collective communication."""
