"""Checks of what users write: the fields of declarations, and the values that calls bring."""
