"""Messages and bytes of a plan: formulas over integers, read by engine and planner alike."""
