"""`kernels.apply_rotary`: the reference, the operator, and the kernel in Triton's interpreter."""

import re

import pytest
import torch

import varlen_graphs as vg
from varlen_graphs.kernels.rotary import reference


def angles(rows, head_dim, dtype=torch.float32):
    half = torch.randn(rows, head_dim // 2, generator=torch.Generator().manual_seed(1))
    wide = torch.cat([half, half], -1)
    return wide.cos().to(dtype), wide.sin().to(dtype)


def test_rotation_equals_the_product_of_complex_numbers():
    q, k, half = torch.randn(7, 2, 8), torch.randn(7, 1, 8), torch.randn(7, 4)
    table = torch.cat([half, half], -1)
    for x, got in zip((q, k), vg.kernels.apply_rotary(q, k, table.cos(), table.sin()), strict=True):
        turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones(7, 4), half)[:, None]
        torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1))


def test_the_operator_is_sound_for_the_compiler():
    q, k, _ = torch.randn(5, 3, 2, 8).unbind(1)
    torch.library.opcheck(torch.ops.varlen_graphs.apply_rotary.default, (q, k[:, :1].bfloat16(), *angles(5, 8)))
    turned = torch.randn(2, 5, 8).transpose(0, 1)  # rows between the heads
    torch.library.opcheck(torch.ops.varlen_graphs.apply_rotary.default, (turned, turned, *angles(5, 8)))


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(4, 2, 8)},
        {"k": torch.zeros(5, 2, 6)},
        {"cos": torch.zeros(1, 8)},
        {"sin": torch.zeros(5, 4)},
        {"q": torch.zeros(5, 2, 7), "k": torch.zeros(5, 2, 7), "cos": torch.zeros(5, 7), "sin": torch.zeros(5, 7)},
        {"q": torch.zeros(5, 2, 8, dtype=torch.int64)},
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(change):
    cos, sin = angles(5, 8)
    arguments = {"q": torch.zeros(5, 2, 8), "k": torch.zeros(5, 2, 8), "cos": cos, "sin": sin} | change
    shapes = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in arguments.items())
    with pytest.raises(vg.errors.InputError, match=re.escape(f"apply_rotary got {shapes}: expected floating q and k")):
        vg.kernels.apply_rotary(**arguments)


def launch(q, k, cos, sin):
    from varlen_graphs.kernels.rotary import triton

    return triton.apply_rotary(q, k, cos, sin)


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, in tests/gpu")


def test_a_table_of_other_channels_than_a_head_says_what_makes_them():
    q, k = torch.randn(5, 2, 8), torch.randn(5, 1, 8)
    hint = (
        "2 * axes * frequencies channels, so declare axes and inv_freq that make 8, or rotate 4 channels of each head"
    )
    with pytest.raises(vg.errors.InputError, match=re.escape(hint)):
        vg.kernels.apply_rotary(q, k, *angles(5, 4))


@needs_interpreter
@pytest.mark.parametrize("head_dim", [2, 32, 40, 64, 72, 80, 96, 112, 128])
@pytest.mark.parametrize(("rows", "heads", "heads_k"), [(0, 2, 2), (1, 1, 1), (13, 3, 1), (45, 4, 2)])
def test_the_kernel_equals_the_reference(head_dim, rows, heads, heads_k):
    q, k = (torch.randn(rows, h, head_dim) for h in (heads, heads_k))
    for got, expected in zip(
        launch(q, k, *angles(rows, head_dim)), reference.apply_rotary(q, k, *angles(rows, head_dim)), strict=True
    ):
        torch.testing.assert_close(got, expected)
        assert got.is_contiguous()


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_reads_a_packed_projection_where_it_lies(dtype):
    q, k, _ = torch.randn(33, 3, 2, 72).to(dtype).unbind(1)
    wide = torch.randn(33, 4, 200).to(dtype)[:, 1:3, 5:77]
    turned = torch.randn(2, 33, 72).to(dtype).transpose(0, 1)  # rows between the heads
    for table in (angles(33, 72), angles(33, 72, dtype)):
        for pair in ((q, k), (wide, turned)):
            for got, expected in zip(launch(*pair, *table), reference.apply_rotary(*pair, *table), strict=True):
                torch.testing.assert_close(got, expected)


@needs_interpreter
def test_what_padding_holds_stays_in_its_rows():
    q, k = torch.randn(40, 2, 32), torch.randn(40, 1, 32)
    cos, sin = angles(40, 32)
    expected = launch(q, k, cos, sin)
    for x in (q, k, cos, sin):
        x[30:] = torch.nan
    for got, clean in zip(launch(q, k, cos, sin), expected, strict=True):
        assert torch.equal(got[:30], clean[:30])
        assert got[30:].isnan().all()
