"""Calls: executed, staged, captured lazily, reported."""

from varlen_graphs.serving.results import Borrowed
from varlen_graphs.serving.staging import Stage

__all__ = [
    "Borrowed",
    "Stage",
]
