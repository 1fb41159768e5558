"""Copies of a module for runs beside those of calls, and what such runs change."""
