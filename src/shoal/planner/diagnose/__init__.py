"""Diagnosis of a run: the time that it loses, by cause, and remedies."""
