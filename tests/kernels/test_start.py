"""Triton's start in a thread."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import sys, torch
from varlen_graphs.kernels import start

start.start_triton([torch.zeros(1)])
assert "triton" not in sys.modules  # on the CPU it may never be needed

class OnGpu:
    is_cuda = True

start.start_triton([torch.zeros(1), OnGpu()])
assert "triton" in sys.modules
thread = start.starting()
start.start_triton([OnGpu()])
assert thread is None or start.starting() in (thread, None)  # no second one
if thread is not None:
    thread.join()
assert start.starting() is None

from triton.runtime.cache import triton_key
assert triton_key.cache_info().currsize == 1 and triton_key.cache_info().misses == 1
"""


def test_triton_starts_once_and_only_where_weights_are_on_a_gpu():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
