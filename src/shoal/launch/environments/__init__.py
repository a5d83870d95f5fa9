"""Environments: for each engine, the variables that say which rank a process is. `detect.py` has their precedence."""
