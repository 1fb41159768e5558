"""Declared inputs: the rows, and other tensors of a row, an item or a call."""

from varlen_graphs.inputs.extra import Input, PerCall, PerItem, PerRow
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.patches import Patches
from varlen_graphs.inputs.rows import Rows

__all__ = ["Input", "Normalize", "Patches", "PerCall", "PerItem", "PerRow", "Rows"]
