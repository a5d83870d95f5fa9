"""Callbacks of a run: the base class, those that are ready-made, and how they are called. See docs/callbacks.md."""
