"""The declaration of a module, and calls by it."""

from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.declared_outputs import Outputs
from varlen_graphs.spec.entries import Entries, FrameRows, Groups, Items, Rows
from varlen_graphs.spec.grid_entries import GridEntries
from varlen_graphs.spec.inputs import Input, PerCall, PerItem, PerRow
from varlen_graphs.spec.normalize import Normalize
from varlen_graphs.spec.patches import Patches
from varlen_graphs.spec.rows import PackedRows

__all__ = [
    "BufferSpec",
    "Entries",
    "FrameRows",
    "GridEntries",
    "Groups",
    "Input",
    "Items",
    "Normalize",
    "Outputs",
    "PackedRows",
    "Patches",
    "PerCall",
    "PerItem",
    "PerRow",
    "Rows",
]
