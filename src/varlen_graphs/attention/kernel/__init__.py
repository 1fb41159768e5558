"""Attention kernel, its reference and its configuration."""
