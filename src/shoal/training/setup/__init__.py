"""From a job and a plan to an engine."""
