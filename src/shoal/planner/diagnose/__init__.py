"""Diagnosis of a run: the time that it loses, by cause, and what would bring it back."""
