"""Planner: search for the parallel plan of a job on a cluster, by predicted time and memory."""
