"""`start_triton`: what it does in a thread, in a process that has not imported triton, and in forks of it."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import os, sys, threading
import torch
import varlen_graphs as vg
from varlen_graphs.kernels import start

class OnGpu:
    is_cuda = True

def once():
    start.start_triton([torch.zeros(1)])
    assert "triton" not in sys.modules and start.hashing() is None  # on the CPU it may never be needed
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

def not_on_the_cpu():
    spec = vg.BufferSpec(rows=vg.inputs.Rows("input", shape=(4,)), layout=vg.Lengths("lengths"))
    encoder = vg.GraphedEncoder(torch.nn.Linear(4, 4).eval(), [256], spec, backend="tape",
                                forward=lambda module, input, lengths: module(input))
    with torch.no_grad():
        encoder(torch.zeros(3, 4), lengths=[3])
    assert encoder.stats.replays
    from triton.runtime.cache import triton_key
    assert triton_key.cache_info().misses == 0

def without_threads():
    def fail(self):
        raise RuntimeError("can't start new thread")
    threading.Thread.start = fail
    start.start_triton([OnGpu()])
    assert start.hashing() is None

for check in (once, not_on_the_cpu, without_threads):
    if not (child := os.fork()):
        check()
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(check.__name__, flush=True)
"""


@pytest.fixture(scope="module")
def ended():
    return subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)


@pytest.mark.parametrize("check", ["once", "not_on_the_cpu", "without_threads"])
def test_triton_starts(ended, check):
    assert check in ended.stdout.split(), ended.stderr
