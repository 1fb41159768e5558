"""Torch modes that watch a run: the rules of captures, uploads, what a graph reads; and the lines of user code."""
