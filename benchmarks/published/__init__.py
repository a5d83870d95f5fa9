"""Published measurements: rows of them, predicted and scored."""
