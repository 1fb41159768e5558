"""Buffers: arguments of a module that are computed from the item table, one file per buffer."""

from varlen_graphs.buffers.attention_mask import AttentionMask
from varlen_graphs.buffers.attention_schedule import AttentionSchedule
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.buffers.cu_seqlens import CuSeqlens
from varlen_graphs.buffers.device_buffer import DeviceBuffer
from varlen_graphs.buffers.grid_positions import GridPositions
from varlen_graphs.buffers.host_buffer import HostBuffer
from varlen_graphs.buffers.interpolation import Interpolation, interpolate_positions
from varlen_graphs.buffers.interpolation_taps import InterpolationIndices, InterpolationWeights
from varlen_graphs.buffers.lookup import Lookup
from varlen_graphs.buffers.mask import Mask
from varlen_graphs.buffers.max_seqlen import MaxSeqlen
from varlen_graphs.buffers.prefix_index import PrefixIndex
from varlen_graphs.buffers.relative_index import GridOffsets, T5Buckets
from varlen_graphs.buffers.relative_position_bias import RelativePositionBias
from varlen_graphs.buffers.rotary_table import RotaryTable
from varlen_graphs.buffers.row_positions import RowPositions
from varlen_graphs.buffers.sincos import SinCos, add_sincos
from varlen_graphs.buffers.sincos_column import SinCosColumn
from varlen_graphs.buffers.window_index import WindowIndex

__all__ = [
    "AttentionMask",
    "AttentionSchedule",
    "Buffer",
    "CuSeqlens",
    "DeviceBuffer",
    "GridOffsets",
    "GridPositions",
    "HostBuffer",
    "Interpolation",
    "InterpolationIndices",
    "InterpolationWeights",
    "Lookup",
    "Mask",
    "MaxSeqlen",
    "PrefixIndex",
    "RelativePositionBias",
    "RotaryTable",
    "RowPositions",
    "SinCos",
    "SinCosColumn",
    "T5Buckets",
    "WindowIndex",
    "add_sincos",
    "interpolate_positions",
]
