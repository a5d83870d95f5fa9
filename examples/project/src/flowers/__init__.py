"""A model of flowers, its data and its training."""
