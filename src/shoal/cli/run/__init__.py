"""The `shoal run` command: preparation, training and result."""
