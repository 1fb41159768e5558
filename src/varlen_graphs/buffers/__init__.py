"""Declared buffers: arguments of a module that follow from the item table, one kind a file."""

from varlen_graphs.buffers.attention_schedule import AttentionSchedule
from varlen_graphs.buffers.base import Buffer
from varlen_graphs.buffers.custom import DeviceBuffer, HostBuffer
from varlen_graphs.buffers.interpolation import (
    Interpolation,
    InterpolationIndices,
    InterpolationWeights,
    interpolate_positions,
)
from varlen_graphs.buffers.lookup import Lookup
from varlen_graphs.buffers.mask import KeyPaddingMask
from varlen_graphs.buffers.positions import GridPositions, RowPositions
from varlen_graphs.buffers.rotary import RotaryTable
from varlen_graphs.buffers.seqlens import CuSeqlens, MaxSeqlen
from varlen_graphs.buffers.sincos import SinCos, SinCosColumn, add_sincos
from varlen_graphs.buffers.windows import WindowIndex

__all__ = [
    "AttentionSchedule",
    "Buffer",
    "CuSeqlens",
    "DeviceBuffer",
    "GridPositions",
    "HostBuffer",
    "Interpolation",
    "InterpolationIndices",
    "InterpolationWeights",
    "KeyPaddingMask",
    "Lookup",
    "MaxSeqlen",
    "RotaryTable",
    "RowPositions",
    "SinCos",
    "SinCosColumn",
    "WindowIndex",
    "add_sincos",
    "interpolate_positions",
]
