"""Calls: executed, staged, captured lazily, reported."""

from varlen_graphs.calls.staging import Stage

__all__ = ["Stage"]
