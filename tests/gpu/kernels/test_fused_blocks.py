"""The fused parts of transformer blocks on the GPU, against their references in float64."""

import pytest
import torch

from tests.support.gpu import on_gpus
from varlen_graphs.kernels.layer_norm import op as layer_norm
from varlen_graphs.kernels.layer_norm import reference as layer_norm_reference
from varlen_graphs.kernels.linear_gelu import op as linear_gelu
from varlen_graphs.kernels.linear_gelu import reference as linear_gelu_reference
from varlen_graphs.kernels.rms_norm import op as rms_norm
from varlen_graphs.kernels.rms_norm import reference as rms_norm_reference
from varlen_graphs.kernels.silu_mul import op as silu_mul
from varlen_graphs.kernels.silu_mul import reference as silu_mul_reference

pytestmark = on_gpus()

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(0, 64), (1, 1), (1, 72), (3, 100), (17, 1152), (129, 1280), (5, 8192), (5, 8200), (16_384, 1536)]


def numbers(*shape, dtype, seed=0):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def assert_rounded(got, expected, steps):
    assert got.dtype != torch.float64
    step = steps * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), SIZES)
def test_sums_and_norms(rows, dim, dtype):
    x, delta = (numbers(rows, 2 * dim, dtype=dtype, seed=seed)[:, :dim] for seed in range(2))
    weight, bias = numbers(2, dim, dtype=dtype, seed=2)
    total = (x + delta).double()  # the norm is that of the rounded sum
    for got, expected in (
        (
            layer_norm.add_layer_norm(x, delta, weight, bias, 1e-6),
            layer_norm_reference.add_layer_norm(total, 0 * total, weight.double(), bias.double(), 1e-6),
        ),
        (
            layer_norm.add_layer_norm(x, delta, weight, None, 1e-6),
            layer_norm_reference.add_layer_norm(total, 0 * total, weight.double(), None, 1e-6),
        ),
        (
            rms_norm.add_rms_norm(x, delta, weight, 1e-6),
            rms_norm_reference.add_rms_norm(total, 0 * total, weight.double(), 1e-6),
        ),
    ):
        assert torch.equal(got[0].double(), total)
        assert_rounded(got[1], expected[1], 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), SIZES)
def test_gates(rows, dim, dtype):
    gate, up = (3 * numbers(rows, dim, dtype=dtype, seed=seed) for seed in range(2))
    expected = silu_mul_reference.silu_mul(gate.double(), up.double())
    assert_rounded(silu_mul.silu_mul(gate, up), expected, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim", "out"), [(1, 64, 72), (17, 1152, 4304), (200, 72, 100), (4096, 1152, 4304)])
def test_products_with_gelu(rows, dim, out, dtype):
    x, weight, bias = numbers(rows, dim, dtype=dtype), numbers(out, dim, dtype=dtype, seed=1), numbers(out, dtype=dtype)
    weight = weight / dim**0.5
    got = linear_gelu.linear_gelu(x, weight, bias)
    expected = linear_gelu_reference.linear_gelu(x.double(), weight.double(), bias.double())
    error = (got.double() - expected).norm() / expected.norm()
    assert error < {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-3}[dtype]  # torch may take TF32
