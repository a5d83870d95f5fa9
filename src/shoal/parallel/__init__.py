"""Ways of dividing a training step over processes."""
