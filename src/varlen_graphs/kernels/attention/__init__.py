"""Attention within segments of packed rows."""
