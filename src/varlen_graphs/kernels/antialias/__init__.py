"""Resampling a square table of position embeddings to the grid of each item, with a filter against aliasing."""
