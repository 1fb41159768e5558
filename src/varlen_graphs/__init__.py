"""Run any variable-length transformer encoder as a handful of CUDA graphs.

Importing this package imports neither triton nor transformers.
"""

from varlen_graphs import parallel, recipes
from varlen_graphs.attention.api import TileSchedule, tile_schedule, varlen_attention
from varlen_graphs.buffers import (
    AttentionSchedule,
    Buffer,
    CuSeqlens,
    DeviceBuffer,
    GridPositions,
    HostBuffer,
    Interpolation,
    InterpolationIndices,
    InterpolationWeights,
    KeyPaddingMask,
    Lookup,
    MaxSeqlen,
    RotaryTable,
    RowPositions,
    SinCos,
    SinCosColumn,
    WindowIndex,
    add_sincos,
    interpolate_positions,
)
from varlen_graphs.capture.pool import Pool
from varlen_graphs.doctor import Diagnosis, Finding, diagnose
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import (
    BudgetError,
    CaptureError,
    InputError,
    LayoutError,
    RankError,
    SpecError,
    StaleGraphError,
    StaleOutputError,
    VarlenGraphsError,
    VerificationError,
)
from varlen_graphs.huggingface.wrap import encoders, unwrap, wrap
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.layout.budgets import Budget, Ladder, PaddedLadder
from varlen_graphs.layout.columns import Column
from varlen_graphs.layout.grids import GridHW, GridTHW, Lengths
from varlen_graphs.layout.item_table import ItemTable
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.nested_column import NestedColumn
from varlen_graphs.layout.padded import PaddedLengths, PaddedMask
from varlen_graphs.layout.segments import Windows
from varlen_graphs.routing.costs import Costs
from varlen_graphs.serving.borrowed import Borrowed
from varlen_graphs.serving.staging import Stage
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.entries import Entries, FrameRows, Groups, Items, Rows
from varlen_graphs.spec.normalize import Normalize
from varlen_graphs.spec.outputs import Outputs
from varlen_graphs.spec.rows import PackedRows
from varlen_graphs.stats import Stats
from varlen_graphs.traffic.planning import Plan, plan
from varlen_graphs.traffic.trace import Trace
from varlen_graphs.verify.verifier import Verified

__version__ = "0.1.0"

__all__ = [
    "AttentionSchedule",
    "Borrowed",
    "Budget",
    "BudgetError",
    "Buffer",
    "BufferSpec",
    "CaptureError",
    "Column",
    "Costs",
    "CuSeqlens",
    "DeviceBuffer",
    "Diagnosis",
    "Entries",
    "Finding",
    "FrameRows",
    "GraphedEncoder",
    "GridHW",
    "GridPositions",
    "GridTHW",
    "Groups",
    "HostBuffer",
    "InputError",
    "Interpolation",
    "InterpolationIndices",
    "InterpolationWeights",
    "ItemTable",
    "Items",
    "KeyPaddingMask",
    "Ladder",
    "Layout",
    "LayoutError",
    "Lengths",
    "Lookup",
    "MaxSeqlen",
    "NestedColumn",
    "Normalize",
    "Outputs",
    "PackedRows",
    "PaddedLadder",
    "PaddedLengths",
    "PaddedMask",
    "Plan",
    "Pool",
    "RankError",
    "RotaryTable",
    "RowPositions",
    "Rows",
    "SinCos",
    "SinCosColumn",
    "SpecError",
    "Stage",
    "StaleGraphError",
    "StaleOutputError",
    "Stats",
    "TileSchedule",
    "Trace",
    "VarlenGraphsError",
    "VerificationError",
    "Verified",
    "WindowIndex",
    "Windows",
    "add_sincos",
    "apply_rotary",
    "diagnose",
    "encoders",
    "interpolate_positions",
    "parallel",
    "plan",
    "recipes",
    "tile_schedule",
    "unwrap",
    "varlen_attention",
    "wrap",
]
