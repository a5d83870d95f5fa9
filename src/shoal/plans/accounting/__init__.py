"""Communication volume and memory of a plan: formulas over integers, used by the engine and the planner."""
