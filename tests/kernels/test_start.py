"""Triton's start in a thread."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

ONCE = """
import sys, threading, torch
from varlen_graphs.kernels import start

start.start_triton([torch.zeros(1)])
assert "triton" not in sys.modules and start.hashing() is None  # on the CPU it may never be needed

class OnGpu:
    is_cuda = True

encoders = [threading.Thread(target=start.start_triton, args=([torch.zeros(1), OnGpu()],)) for _ in range(8)]
for encoder in encoders:
    encoder.start()
for encoder in encoders:
    encoder.join()
assert "triton" in sys.modules
if (thread := start.hashing()) is not None:
    thread.join()
assert start.hashing() is None

from triton.runtime.cache import triton_key
assert (triton_key.cache_info().misses, triton_key.cache_info().currsize) == (1, 1)
"""

ON_THE_CPU = """
import torch, varlen_graphs as vg

spec = vg.BufferSpec(rows=vg.inputs.Rows("input", shape=(4,)), layout=vg.Lengths("lengths"))
encoder = vg.GraphedEncoder(torch.nn.Linear(4, 4).eval(), [256], spec, backend="tape",
                            forward=lambda module, input, lengths: module(input))
with torch.no_grad():
    encoder(torch.zeros(3, 4), lengths=[3])
assert encoder.stats.replays

from triton.runtime.cache import triton_key
assert triton_key.cache_info().misses == 0
"""

NO_THREADS = """
import threading
from varlen_graphs.kernels import start

def fail(self):
    raise RuntimeError("can't start new thread")

class OnGpu:
    is_cuda = True

threading.Thread.start = fail
start.start_triton([OnGpu()])
assert start.hashing() is None
"""


@pytest.mark.parametrize("script", [ONCE, ON_THE_CPU, NO_THREADS], ids=["once", "not on the CPU", "without threads"])
def test_triton_starts(script):
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
