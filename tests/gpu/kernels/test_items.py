"""The kernels that read the item table against their references, compiled, at the sizes of real towers."""

import pytest
import torch
import torch.nn.functional as F

import varlen_graphs as vg
from tests.support.gpu import TWO_GPUS, on_gpus
from varlen_graphs.kernels.antialias import reference as antialias_reference
from varlen_graphs.kernels.antialias.op import antialias
from varlen_graphs.kernels.cu_seqlens import reference as cu_seqlens_reference
from varlen_graphs.kernels.cu_seqlens.op import cu_seqlens
from varlen_graphs.kernels.interpolation import reference as interpolation_reference
from varlen_graphs.kernels.interpolation.op import interpolate, interpolation_taps
from varlen_graphs.kernels.positions import reference as positions_reference
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.kernels.rotary_table import reference as rotary_reference
from varlen_graphs.kernels.rotary_table.op import rotary_table
from varlen_graphs.kernels.windows import reference as windows_reference
from varlen_graphs.kernels.windows.op import cu_window_seqlens, window_index

pytestmark = on_gpus()

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MODES = ["bilinear", "bicubic"]

CASES = {
    "one row": ([(1, 1, 1)], 1, 1),
    "nothing but padding": ([], 3, 129),
    "one block": ([(1, 2, 2)], 1, 4),
    "a block and a row": ([(1, 2, 2), (1, 1, 1)], 2, 5),
    "a row less than a block": ([(1, 1, 127)], 8, 127),
    "images": ([(1, 14, 14), (1, 28, 42), (1, 2, 2)], 24, 1536),
    "a video": ([(8, 14, 14)], 9, 1700),
    "a full budget": ([(1, 128, 128)], 1, 16_384),
    "many items": ([(1, 8, 8)] * 256, 256, 16_384),
    "many items, some padding": ([(2, 4, 6)] * 200, 256, 16_384),
    "more items than there are": ([(1, 2, 4)] * 129, 1000, 8192),
}
"""Items, and capacities of items and rows."""


@pytest.fixture(params=CASES, ids=str)
def case(request):
    """A table in the middle of a larger one, with an extra column, and its rows."""
    items, capacity, rows = CASES[request.param]
    arena = torch.full((capacity + 2, 5), 9, device="cuda")
    table = arena[1 : capacity + 1, :4]
    table[:, :3] = 0
    if items:
        table[: len(items), :3] = torch.tensor(items)
    return table, rows


@pytest.mark.parametrize("by_frame", [False, True])
def test_cu_seqlens(case, by_frame):
    table, _ = case
    for segments in (max(1, int(table[:, 0].sum())), 2048):
        expected = cu_seqlens_reference.cu_seqlens(table, segments, by_frame)
        assert torch.equal(cu_seqlens(table, segments, by_frame), expected)


@pytest.mark.parametrize("every", [1, 2, 7])
def test_cu_seqlens_of_groups(case, every):
    table, _ = case
    item = torch.arange(len(table), device="cuda")
    grouped = torch.cat([table, (item % every == 0).long()[:, None]], 1)
    for segments in (len(table), 2048):
        expected = cu_seqlens_reference.cu_seqlens(grouped, segments, False, 4)
        assert torch.equal(cu_seqlens(grouped, segments, False, 4), expected)


@pytest.mark.parametrize("axes", ["h w", "t h w", "row"])
@pytest.mark.parametrize("merge", [1, 2])
def test_positions(case, axes, merge):
    table, rows = case
    assert torch.equal(positions(table, rows, axes, merge), positions_reference.positions(table, rows, axes, merge))


@pytest.mark.parametrize("side", [1, 8, 100])
def test_cu_window_seqlens(case, side):
    table, _ = case
    for segments in (1, 700, 5000):
        expected = windows_reference.cu_window_seqlens(table, segments, side)
        assert torch.equal(cu_window_seqlens(table, segments, side), expected)


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("side", [1, 4, 50])
@pytest.mark.parametrize("inverse", [False, True])
def test_window_index(case, merge, side, inverse):
    table, rows = case
    arguments = (table, -(-rows // merge**2), merge, side, inverse)
    assert torch.equal(window_index(*arguments), windows_reference.window_index(*arguments))


@pytest.mark.parametrize("side", [0, 4])
@pytest.mark.parametrize(("axes", "frequencies"), [("h w", 18), ("h w", 16), ("row", 64), ("t h w", 5), ("w h", 1)])
def test_rotary_table(case, axes, frequencies, side):
    table, rows = case
    inv_freq = 10_000.0 ** -(torch.arange(frequencies, device="cuda") / frequencies)
    got = rotary_table(table, rows, inv_freq, axes, 2, side)
    expected = rotary_reference.rotary_table(table, rows, inv_freq, axes, 2, side)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2.4e-7)


def test_angles_of_thousands_of_radians_are_reduced_exactly():
    rows = 100_000
    table = torch.tensor([[1, 1, rows]], device="cuda")
    inv_freq = torch.tensor([1.0, 0.37, 7.3], device="cuda")
    exact = torch.arange(rows, device="cuda")[:, None].float() * inv_freq
    cos, sin = rotary_table(table, rows, inv_freq, "row", 1)
    torch.testing.assert_close(cos[:, :3].double(), exact.double().cos(), rtol=0, atol=1.8e-7)
    torch.testing.assert_close(sin[:, :3].double(), exact.double().sin(), rtol=0, atol=1.8e-7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("merge", [1, 2])
def test_interpolation_taps(case, mode, align_corners, merge):
    table, rows = case
    arguments = (table, rows, 48, mode, align_corners, merge)
    indices, weights = interpolation_taps(*arguments)
    expected_indices, expected_weights = interpolation_reference.interpolation_taps(*arguments)
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=2e-7)


@pytest.mark.parametrize("dim", [1152, 1024, 72, 129])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_interpolation(case, mode, dtype, dim):
    """Bit for bit: every operation is rounded as in the reference."""
    table, rows = case
    entries, add = torch.randn(48 * 48, dim, device="cuda").to(dtype), torch.randn(rows, dim, device="cuda").to(dtype)
    for align_corners, accum_dtype in ((False, torch.float32), (True, dtype)):
        for added in (None, add):
            arguments = (entries, table, rows, mode, align_corners, 2, accum_dtype, added)
            assert torch.equal(interpolate(*arguments), interpolation_reference.interpolate(*arguments))


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_interpolation_equals_that_of_torch(mode, align_corners):
    """In float64, because torch's own float32 coordinates are off by more than ours on large tables."""
    entries = torch.randn(48 * 48, 64, device="cuda")
    image = entries.double().T.reshape(1, 64, 48, 48)
    for height, width in ((14, 14), (84, 84), (28, 90), (1, 200), (128, 128)):
        table = vg.layouts.ItemTable(
            torch.tensor([[1, height, width]], device="cuda"), vg.budgets.Budget(height * width), vg.GridTHW()
        )
        got = vg.buffers.interpolate_positions(entries, table, mode=mode, align_corners=align_corners)
        expected = F.interpolate(image, (height, width), mode=mode, align_corners=align_corners)
        torch.testing.assert_close(got.double(), expected[0].flatten(1).T, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dim", [1152, 72, 129])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", [16, 27])
def test_antialiased_interpolation(case, side, dtype, dim):
    """Half precision differs by a rounding where float32 sums do."""
    table, rows = case
    entries, add = torch.randn(side**2, dim, device="cuda").to(dtype), torch.randn(rows, dim, device="cuda").to(dtype)
    for added in (None, add):
        arguments = (entries, table, rows, 2, torch.float32, added)
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(
            antialias(*arguments), antialias_reference.antialias(*arguments), rtol=tolerance, atol=tolerance
        )


def test_antialiased_interpolation_equals_that_of_torch():
    for side in (16, 27):
        entries = torch.randn(side * side, 64, device="cuda")
        image = entries.double().T.reshape(1, 64, side, side)
        for height, width in ((16, 16), (5, 51), (32, 32), (1, 200), (40, 3), (1, 1), (27, 14)):
            sizes = torch.tensor([[1, height, width]], device="cuda")
            table = vg.layouts.ItemTable(sizes, vg.budgets.Budget(height * width), vg.GridTHW())
            got = vg.buffers.interpolate_positions(entries, table, antialias=True)
            expected = F.interpolate(image, (height, width), mode="bilinear", antialias=True)
            torch.testing.assert_close(got.double(), expected[0].flatten(1).T, rtol=0, atol=1e-5)


def test_what_padding_rows_hold_stays_there():
    table = vg.layouts.ItemTable(
        torch.tensor([[1, 6, 6], [0, 0, 0]], device="cuda"), vg.budgets.Budget(128), vg.GridTHW(merge=2)
    )
    entries, add = torch.randn(576, 1152, device="cuda"), torch.randn(128, 1152, device="cuda")
    quiet = vg.buffers.interpolate_positions(entries, table, add=add)
    add[36:] = torch.nan
    assert torch.equal(vg.buffers.interpolate_positions(entries, table, add=add)[:36], quiet[:36])


def test_a_graph_computes_anew_what_the_table_holds():
    table = torch.tensor([[1, 4, 4], [0, 0, 0]], device="cuda")
    entries, inv_freq = torch.randn(576, 72, device="cuda"), torch.rand(18, device="cuda")

    def compute():
        return (
            cu_seqlens(table, 8, True),
            positions(table, 64, "t h w", 2),
            *rotary_table(table, 64, inv_freq, "h w", 2),
            cu_window_seqlens(table, 20, 4),
            window_index(table, 16, 2, 2, False),
            window_index(table, 16, 2, 2, True),
            *interpolation_taps(table, 64, 24, "bicubic", False, 2),
            interpolate(entries, table, 64, "bicubic", False, 2, torch.float32),
            antialias(entries, table, 64, 2, torch.float32),
        )

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    table.copy_(torch.tensor([[2, 2, 6], [1, 4, 8]]))
    graph.replay()
    assert all(map(torch.equal, captured, compute()))
    assert captured[0].tolist() == [0, 12, 24, 56, 56, 56, 56, 56, 56]


def test_the_operators_keep_what_they_declare():
    table = torch.tensor([[1, 2, 4], [2, 2, 2], [0, 0, 0]], device="cuda")
    entries, add = torch.randn(25, 6, device="cuda").bfloat16(), torch.randn(20, 6, device="cuda")
    taps = ("bicubic", True, 2)
    torch.library.opcheck(cu_seqlens, (table, 7, True))
    torch.library.opcheck(positions, (table, 20, "t h w row", 2))
    torch.library.opcheck(rotary_table, (table, 20, torch.rand(3, device="cuda"), "h w", 2))
    torch.library.opcheck(cu_window_seqlens, (table, 7, 2))
    torch.library.opcheck(window_index, (table, 5, 2, 1, True))
    torch.library.opcheck(interpolation_taps, (table, 20, 5, *taps))
    torch.library.opcheck(interpolate, (entries, table, 20, *taps, torch.float32))
    torch.library.opcheck(interpolate, (entries, table, 20, *taps, torch.bfloat16, add))


@TWO_GPUS
def test_tensors_may_be_on_another_device_than_the_current_one():
    table = torch.tensor([[1, 4, 4]], device="cuda:1")
    assert positions(table, 16, "row", 1).flatten().tolist() == list(range(16))
