"""Tensor parallelism: layers cut over the tensor axis."""
