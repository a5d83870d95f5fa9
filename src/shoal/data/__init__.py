"""Samples: their order as arithmetic, their fetching, their way to the device."""
