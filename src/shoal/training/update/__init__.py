"""The update: summed gradients become new parameters."""
