"""Jobs: problems to train, with their files or objects, settings and code, without devices."""
