"""Corrections of predictions by what runs took."""
