"""Requests for training runs, and their files on disk."""
