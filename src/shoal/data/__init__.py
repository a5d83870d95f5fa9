"""Input data: order of samples, fetching, and transfer to the device."""
