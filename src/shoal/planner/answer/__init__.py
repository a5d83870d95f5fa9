"""Results of `shoal plan`: the chosen plan, its prediction, and how it scales."""
