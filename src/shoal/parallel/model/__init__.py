"""Sharded models: tensor slices, model structure, deferred initialization."""
