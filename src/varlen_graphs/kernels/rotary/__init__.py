"""Rotation of queries and keys by rotary position embedding."""
