"""Launchers: for each engine, a module that renders and starts a run on it. `base.py` has the common parts."""
