"""Items of a call: how arguments describe them, the budgets they fill, and the item table on the device."""

from varlen_graphs.layout.arguments import LayoutArgument
from varlen_graphs.layout.batch import Batch
from varlen_graphs.layout.budgets import Budget, DefaultBudgets, Ladder, PaddedLadder
from varlen_graphs.layout.columns import Column, NestedColumn
from varlen_graphs.layout.grids import GridHW, GridTHW, Lengths
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.padded import PackedMask, PaddedLengths, PaddedMask
from varlen_graphs.layout.patch_positions import PatchPositions
from varlen_graphs.layout.pictures import PictureMask, PictureSizes
from varlen_graphs.layout.segments import Windows

__all__ = [
    "Batch",
    "Budget",
    "Column",
    "DefaultBudgets",
    "GridHW",
    "GridTHW",
    "ItemTable",
    "Ladder",
    "Layout",
    "LayoutArgument",
    "Lengths",
    "NestedColumn",
    "PackedMask",
    "PaddedLadder",
    "PaddedLengths",
    "PaddedMask",
    "PatchPositions",
    "PictureMask",
    "PictureSizes",
    "Windows",
]
