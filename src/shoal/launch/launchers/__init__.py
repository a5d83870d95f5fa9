"""Launchers: of each engine a module that renders and starts a run there; `base.py` has what they have in common."""
