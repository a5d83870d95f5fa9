"""Sums of gradients in fewer bytes."""
