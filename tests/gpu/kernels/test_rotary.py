"""The rotation of queries and keys on the GPU, against its reference."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import TWO_GPUS, on_gpus
from varlen_graphs.kernels.rotary import reference

pytestmark = on_gpus()

KERNELS = [
    *[(torch.bfloat16, head_dim) for head_dim in (32, 40, 64, 72, 80, 96, 112, 128, 256)],
    *[(dtype, head_dim) for dtype in (torch.float16, torch.float32) for head_dim in (72, 128)],
]


def table(rows, head_dim, dtype=torch.float32):
    half = torch.randn(rows, head_dim // 2, device="cuda")
    wide = torch.cat([half, half], -1)
    return wide.cos().to(dtype), wide.sin().to(dtype)


def check_rotation(q, k, cos, sin):
    for x, got, expected in zip(
        (q, k), vg.kernels.apply_rotary(q, k, cos, sin), reference.apply_rotary(q, k, cos, sin), strict=True
    ):
        assert got.is_contiguous()
        step = torch.finfo(x.dtype).eps
        torch.testing.assert_close(got, expected, rtol=2 * step, atol=2 * step, equal_nan=True)


@pytest.mark.parametrize(("dtype", "head_dim"), KERNELS, ids=str)
def test_the_kernel_equals_the_reference(dtype, head_dim):
    for rows in (0, 1, 333, 16_384):
        q, k, _ = torch.randn(rows, 3, 16, head_dim, device="cuda").to(dtype).unbind(1)
        cos, sin = table(rows, head_dim)
        check_rotation(q, k, cos, sin)
        for x in (q, k, cos, sin):
            x[rows - rows // 3 :] = torch.nan
        check_rotation(q, k, cos, sin)


def test_other_layouts_fewer_key_heads_and_half_precision_angles():
    q = torch.randn(8, 100, 64, device="cuda").bfloat16().transpose(0, 1)
    k = torch.randn(100, 2, 64, 2, device="cuda").bfloat16()[..., 1]
    check_rotation(q, k, *table(100, 64, torch.bfloat16))


def test_more_elements_than_32_bits_count():
    rows = 2**32 // (16 * 128) + 100
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GB of GPU memory")
    q = torch.ones(rows, 16, 128, device="cuda", dtype=torch.bfloat16)
    cos, sin = table(rows, 128)
    got, _ = vg.kernels.apply_rotary(q, q[:, :1], cos, sin)
    for at in (slice(0, 50), slice(-150, None)):
        expected, _ = reference.apply_rotary(q[at], q[at, :1], cos[at], sin[at])
        torch.testing.assert_close(got[at], expected, rtol=1e-2, atol=1e-2)


@TWO_GPUS
def test_tensors_on_another_device_than_the_current_one():
    q, k = torch.randn(2, 50, 2, 64, device="cuda:1").unbind(0)
    cos, sin = (x.to("cuda:1") for x in table(50, 64))
    with torch.cuda.device(0):
        check_rotation(q, k, cos, sin)
