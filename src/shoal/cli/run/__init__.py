"""The `shoal run` command: prepared, trained, and its result written."""
