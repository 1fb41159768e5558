"""Run any variable-length transformer encoder as a handful of CUDA graphs.

    import varlen_graphs as vg

    vg.wrap(model)  # a whole model of Hugging Face, or
    encoder = vg.GraphedEncoder(module, vg.Ladder(256, 16_384), vg.BufferSpec(...))  # any module

Twelve names serve most code. The others are in the package of what they declare or set: `vg.inputs.Rows`,
`vg.outputs.Rows`, `vg.layouts.GridHW`, `vg.buffers.CuSeqlens`, `vg.budgets.Budget`, `vg.options.Capture`,
`vg.errors.CaptureError` and so on. Importing this package imports neither triton nor transformers.
"""

from varlen_graphs import (
    attention,
    budgets,
    buffers,
    errors,
    inputs,
    kernels,
    layouts,
    options,
    outputs,
    parallel,
    recipes,
    traffic,
)
from varlen_graphs.attention import varlen_attention
from varlen_graphs.budgets import Ladder
from varlen_graphs.declaration import BufferSpec
from varlen_graphs.doctor import diagnose
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.huggingface.wrap import encoders, unwrap, wrap
from varlen_graphs.layouts import Batch, GridTHW, Lengths, Mask

__version__ = "0.2.0"

__all__ = [
    "Batch",
    "BufferSpec",
    "GraphedEncoder",
    "GridTHW",
    "Ladder",
    "Lengths",
    "Mask",
    "attention",
    "budgets",
    "buffers",
    "diagnose",
    "encoders",
    "errors",
    "inputs",
    "kernels",
    "layouts",
    "options",
    "outputs",
    "parallel",
    "recipes",
    "traffic",
    "unwrap",
    "varlen_attention",
    "wrap",
]


def __dir__() -> list[str]:
    return __all__
