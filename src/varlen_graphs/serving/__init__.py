"""Calls: executed, staged, captured lazily, reported."""

from varlen_graphs.serving.staging import Stage

__all__ = ["Stage"]
