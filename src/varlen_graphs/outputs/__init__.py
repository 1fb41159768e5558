"""Declared outputs: the entries of each tensor that belong to each item."""

from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Entries, FrameRows, Groups, Items, Rows
from varlen_graphs.outputs.grid_entries import GridEntries

__all__ = ["Entries", "Fields", "FrameRows", "GridEntries", "Groups", "Items", "Rows"]
