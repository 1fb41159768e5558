"""Run any variable-length transformer encoder as a handful of CUDA graphs.

The names here are what most code needs. More live in the rooms: `vg.buffers`, `vg.layout`, `vg.spec`, `vg.attention`,
`vg.recipes`, `vg.parallel`, `vg.traffic` and so on. Importing this package imports neither triton nor transformers.
"""

from varlen_graphs import (  # rooms, for `vg.buffers.Lookup` and the like
    attention as attention,
)
from varlen_graphs import (
    buffers as buffers,
)
from varlen_graphs import (
    doctor as doctor,
)
from varlen_graphs import (
    errors as errors,
)
from varlen_graphs import (
    kernels as kernels,
)
from varlen_graphs import (
    layout as layout,
)
from varlen_graphs import (
    parallel as parallel,
)
from varlen_graphs import (
    recipes as recipes,
)
from varlen_graphs import (
    routing as routing,
)
from varlen_graphs import (
    serving as serving,
)
from varlen_graphs import (
    spec as spec,
)
from varlen_graphs import (
    stats as stats,
)
from varlen_graphs import (
    traffic as traffic,
)
from varlen_graphs import (
    verify as verify,
)
from varlen_graphs.attention import varlen_attention
from varlen_graphs.buffers import (
    AttentionMask,
    CuSeqlens,
    DeviceBuffer,
    GridPositions,
    HostBuffer,
    Interpolation,
    KeyPaddingMask,
    MaxSeqlen,
    PrefixIndex,
    RotaryTable,
)
from varlen_graphs.capture.options import Capture
from varlen_graphs.capture.pool import Pool
from varlen_graphs.doctor import diagnose
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import (
    BudgetError,
    CaptureError,
    CompilerError,
    InputError,
    LayoutError,
    RankError,
    SpecError,
    StaleGraphError,
    VarlenGraphsError,
    VerificationError,
)
from varlen_graphs.huggingface.wrap import encoders, unwrap, wrap
from varlen_graphs.layout import (
    Batch,
    Budget,
    Column,
    GridHW,
    GridTHW,
    Ladder,
    Lengths,
    PackedMask,
    PaddedLadder,
    PaddedLengths,
    PaddedMask,
    Windows,
)
from varlen_graphs.layout.options import GpuLayouts
from varlen_graphs.spec import BufferSpec, Entries, Items, Outputs, PackedRows, PerCall, PerItem, PerRow, Rows
from varlen_graphs.verify.options import Verify

__version__ = "0.1.0"

__all__ = [
    "AttentionMask",
    "Batch",
    "Budget",
    "BudgetError",
    "BufferSpec",
    "Capture",
    "CaptureError",
    "Column",
    "CompilerError",
    "CuSeqlens",
    "DeviceBuffer",
    "Entries",
    "GpuLayouts",
    "GraphedEncoder",
    "GridHW",
    "GridPositions",
    "GridTHW",
    "HostBuffer",
    "InputError",
    "Interpolation",
    "Items",
    "KeyPaddingMask",
    "Ladder",
    "LayoutError",
    "Lengths",
    "MaxSeqlen",
    "Outputs",
    "PackedMask",
    "PackedRows",
    "PaddedLadder",
    "PaddedLengths",
    "PaddedMask",
    "PerCall",
    "PerItem",
    "PerRow",
    "Pool",
    "PrefixIndex",
    "RankError",
    "RotaryTable",
    "Rows",
    "SpecError",
    "StaleGraphError",
    "VarlenGraphsError",
    "VerificationError",
    "Verify",
    "Windows",
    "diagnose",
    "encoders",
    "parallel",
    "recipes",
    "unwrap",
    "varlen_attention",
    "wrap",
]
