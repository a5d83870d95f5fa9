"""The plans of a space in the order of an aim."""
