"""Boundaries of segments."""
