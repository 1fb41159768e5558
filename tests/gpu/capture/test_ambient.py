"""Settings that kernels are chosen by: a graph keeps those of its capture, so calls with others run the module."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.gpu import on_gpus

pytestmark = on_gpus()

SIZE = 512


@pytest.mark.parametrize("captured", ["ieee", "tf32"])
def test_products_are_rounded_as_the_caller_asks(captured):
    torch.manual_seed(0)
    module, rows = nn.Linear(SIZE, SIZE).cuda().eval().requires_grad_(False), torch.randn(SIZE, SIZE, device="cuda")
    encoder = vg.GraphedEncoder(module, [SIZE], vg.BufferSpec("input", vg.Lengths("lengths")))
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        outputs = {}
        for precision in (captured, "tf32" if captured == "ieee" else "ieee"):
            matmul.fp32_precision = precision
            outputs[precision] = encoder(rows, lengths=[SIZE])
            exact = (rows.double() @ module.weight.double().T + module.bias.double()).float()
            error = float((outputs[precision] - exact).norm() / exact.norm())
            assert (error > 1e-5) == (precision == "tf32")
    finally:
        matmul.fp32_precision = before
    assert encoder.stats.eager == {"TF32 differs from the capture": 1}
    assert encoder.stats.replays.total() == 1
