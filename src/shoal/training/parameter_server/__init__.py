"""Serving: the processes of a run whose parameters are kept by servers. See docs/parameter-server.md."""
