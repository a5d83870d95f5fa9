"""Performance model: seconds and bytes of a step under a plan, computed from values without torch."""
