"""Measurements of a step: clock, records, meters and traces."""
