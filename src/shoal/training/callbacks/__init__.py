"""Callbacks of a run: the base class, the ready-made callbacks, and their caller. See docs/callbacks.md."""
