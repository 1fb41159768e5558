"""Resampling of a square table of position embeddings to the grid of each item."""
