"""Compiles kernels for a GPU that is not there: `python -m tests.support.compiling`, without Triton's interpreter.

The interpreter runs kernels as Python, which forgives what the compiler refuses. Triton compiles for any GPU on any
machine, down to machine code; only the launch is left out.
"""

from contextlib import suppress
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.support.segments import boundaries, unaligned
from varlen_graphs.attention.hopper.config import long_keys
from varlen_graphs.attention.kernel.triton import attention
from varlen_graphs.attention.tile_schedule import reference
from varlen_graphs.attention.tile_schedule.triton import tile_schedule
from varlen_graphs.kernels.antialias.triton import antialias
from varlen_graphs.kernels.check.triton import check_items
from varlen_graphs.kernels.copy_rows.triton import copy_rows
from varlen_graphs.kernels.cu_seqlens.triton import cu_seqlens
from varlen_graphs.kernels.interpolation.triton import interpolate, interpolation_taps
from varlen_graphs.kernels.launch import Compiling, compiling_in_threads
from varlen_graphs.kernels.layer_norm.triton import add_layer_norm
from varlen_graphs.kernels.patches.triton import patches
from varlen_graphs.kernels.positions.triton import positions
from varlen_graphs.kernels.rms_norm.triton import add_rms_norm
from varlen_graphs.kernels.rotary.triton import apply_rotary
from varlen_graphs.kernels.rotary_table.triton import rotary_table
from varlen_graphs.kernels.silu_mul.triton import silu_mul
from varlen_graphs.kernels.start import start_triton
from varlen_graphs.kernels.windows.triton import cu_window_seqlens, window_index

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 100
CU_SEQLENS = boundaries([60, 40])
TABLE = torch.tensor([[1, 6, 10], [1, 4, 10], [0, 0, 0]])

KERNELS = {}
"""The kernels that were compiled, by name."""


class Hopper:
    """A driver of a GPU of that kind."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def is_active(self):
        return True


def attend(head_dim, dtype=BF16, block=64, window=(-1, -1), layout=lambda x: x, bias=None):
    q, k, v = torch.zeros(ROWS, 3, 4, head_dim, dtype=dtype).unbind(1)
    tiles = reference.tile_schedule(CU_SEQLENS, CU_SEQLENS, ROWS, block, long_keys(head_dim))
    attention(q, layout(k), layout(v), tiles, block, 0.1, *window, bias)


def compile_attention():
    attend(72)
    attend(88, window=(5, 3))
    attend(40, FP32, layout=unaligned)
    attend(32, window=(5, 3), bias=torch.zeros(4, 257, dtype=BF16))


def compile_others():
    rows, add = torch.zeros(2, ROWS, 72, dtype=BF16).unbind(0)
    norm = torch.ones(2, 72, dtype=BF16).unbind(0)
    tile_schedule(CU_SEQLENS, CU_SEQLENS, ROWS, 64, long_keys(72))
    apply_rotary(*torch.zeros(2, ROWS, 4, 72, dtype=BF16).unbind(0), *torch.zeros(2, ROWS, 72).unbind(0))
    rotary_table(TABLE, ROWS, torch.ones(18), "h w", 2)
    rotary_table(TABLE, ROWS, torch.ones(18), "h w", 2, 4)
    positions(TABLE, ROWS, "t h w row", 2)
    patches(TABLE, torch.zeros(ROWS, 588, dtype=torch.uint8), torch.zeros(2, 3), 14, 2, 2, BF16)
    for by_frame in (True, False):
        cu_seqlens(TABLE, 8, by_frame)
    cu_window_seqlens(TABLE, 8, 2)
    window_index(TABLE, ROWS // 4, 2, 2, False)
    for mode in ("bilinear", "bicubic"):
        interpolation_taps(TABLE, ROWS, 5, mode, False, 2)
        interpolate(torch.zeros(25, 72, dtype=BF16), TABLE, ROWS, mode, True, 2, FP32, rows)
    antialias(torch.zeros(25, 72, dtype=BF16), TABLE, ROWS, 2, FP32, rows)
    add_layer_norm(rows, add, *norm, 1e-6)
    add_rms_norm(rows, add, norm[0], 1e-6)
    silu_mul(rows, add)
    source = torch.zeros(4, dtype=torch.int64)
    for places in (source, source[:0]):
        copy_rows(source, places, rows)
    header, padding, status = (torch.zeros(n, dtype=torch.int64) for n in (5, 8, 6))
    for frames, window in ((True, 0), (False, 2)):
        check_items(header, TABLE, padding, status, torch.zeros(1), 1, 2, 4, 8, 64, frames, not frames, window)


def compile_in_threads():
    """Kernels compile in threads, once each, when Triton has started, and are launched then; from the cache, at once."""
    rows, add = torch.zeros(2, ROWS, 72, dtype=BF16).unbind(0)
    norm = torch.ones(2, 72, dtype=BF16).unbind(0)
    operators = [lambda: silu_mul(rows, add), lambda: add_layer_norm(rows, add, *norm, 1e-6)]
    start_triton([SimpleNamespace(is_cuda=True)])
    with compiling_in_threads(), suppress(Compiling):
        silu_mul(rows, add)
        raise AssertionError("launched while Triton starts")
    assert not KERNELS
    with compiling_in_threads() as compilation:
        for compiles in operators:
            with suppress(Compiling):
                compiles()
                raise AssertionError("launched before it was compiled")
    assert compilation.used_references
    with compiling_in_threads() as compilation:
        for launches in operators:
            launches()
    assert not compilation.used_references
    for kernel in KERNELS.values():
        kernel.device_caches.clear()  # as in a new process
    with compiling_in_threads():
        for loads in operators:
            loads()


def main():
    run = JITFunction.run

    def compile_only(kernel, *args, warmup, **options):
        KERNELS[kernel.fn.__name__] = kernel
        return run(kernel, *args, warmup=True, **options)

    driver.set_active(Hopper())
    JITFunction.run = compile_only
    for name, compiles in {
        "in threads": compile_in_threads, "attention": compile_attention, "others": compile_others,
    }.items():  # fmt: skip
        KERNELS.clear()
        compiles()
        print(f"{name}: {' '.join(KERNELS)}")


if __name__ == "__main__":
    main()
