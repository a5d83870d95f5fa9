"""Mixtures of experts: the blocks of a model, and tokens sent to the rank that has their expert."""
