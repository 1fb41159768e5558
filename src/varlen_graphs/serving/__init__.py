"""Calls: executed, staged, captured lazily, reported."""
