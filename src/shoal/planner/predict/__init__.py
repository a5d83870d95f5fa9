"""Performance model: seconds and bytes of a step under a plan, from values alone."""
