"""Layouts: arguments that describe the items of a call, and the item table on the device."""

from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.batch import Batch
from varlen_graphs.layouts.columns import Column, NestedColumn
from varlen_graphs.layouts.grids import GridHW, GridTHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.items import Layout
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.layouts.mask import Mask
from varlen_graphs.layouts.patch_positions import PatchPositions
from varlen_graphs.layouts.pictures import PictureMask, PictureSizes
from varlen_graphs.layouts.segments import Windows

__all__ = [
    "Batch",
    "Column",
    "GridHW",
    "GridTHW",
    "ItemTable",
    "Layout",
    "LayoutArgument",
    "Lengths",
    "Mask",
    "NestedColumn",
    "PatchPositions",
    "PictureMask",
    "PictureSizes",
    "Windows",
]
