"""Communication volume and memory of a plan: formulas over integers, read by engine and planner alike."""
