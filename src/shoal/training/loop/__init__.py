"""The step loop, and what follows a step."""
