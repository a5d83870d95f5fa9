"""Training loop and its parts."""
