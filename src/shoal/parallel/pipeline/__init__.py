"""Pipeline parallelism: stages, their messages and schedules."""
