"""A run as a request and as files on disk."""
