"""Kernels compile for a GPU, on machines that have none."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, in tests/gpu")

KERNELS = {
    "in threads": {"_add_layer_norm", "_silu_mul"},
    "attention": {"_attention"},
    "others": {
        "_add_layer_norm", "_add_rms_norm", "_check_items", "_copy_rows", "_rotary", "_schedule", "_silu_mul", "antialias_kernel",
        "cu_seqlens_kernel", "cu_window_seqlens_kernel", "interpolate_kernel", "interpolation_taps_kernel",
        "patches_kernel", "positions_kernel", "rotary_table_kernel", "window_index_kernel",
    },
}  # fmt: skip


def test_kernels_compile_for_a_gpu(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compiling"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    compiled = dict(line.split(": ") for line in ended.stdout.splitlines())
    assert {name: {*kernels.split()} for name, kernels in compiled.items()} == KERNELS
