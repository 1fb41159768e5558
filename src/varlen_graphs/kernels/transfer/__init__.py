"""Copies of memory by address, which a graph reads at each replay."""
