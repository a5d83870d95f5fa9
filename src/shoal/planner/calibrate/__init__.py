"""Calibration of predictions by measured runs."""
