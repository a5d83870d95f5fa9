"""Search of a plan space in the order of an objective."""
