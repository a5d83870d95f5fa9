"""Parameter server: servers, workers and the conductor of a run. See docs/parameter-server.md."""
