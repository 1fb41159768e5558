"""Towers that no recipe is for: understood by inspection, by running them, or by their first call."""
