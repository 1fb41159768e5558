"""The kernels that read the item table against their references: in Triton's interpreter, or on a GPU where there is one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from varlen_graphs.kernels.antialias import reference as antialias_reference
from varlen_graphs.kernels.antialias import triton as antialias_triton
from varlen_graphs.kernels.antialias.op import antialias
from varlen_graphs.kernels.cu_seqlens import reference as cu_seqlens_reference
from varlen_graphs.kernels.cu_seqlens import triton as cu_seqlens_triton
from varlen_graphs.kernels.cu_seqlens.op import cu_seqlens
from varlen_graphs.kernels.interpolation import reference as interpolation_reference
from varlen_graphs.kernels.interpolation import triton as interpolation_triton
from varlen_graphs.kernels.interpolation.op import interpolate, interpolation_taps
from varlen_graphs.kernels.patches import reference as patches_reference
from varlen_graphs.kernels.patches import triton as patches_triton
from varlen_graphs.kernels.patches.op import patches
from varlen_graphs.kernels.positions import reference as positions_reference
from varlen_graphs.kernels.positions import triton as positions_triton
from varlen_graphs.kernels.positions.op import positions
from varlen_graphs.kernels.rotary_table import reference as rotary_reference
from varlen_graphs.kernels.rotary_table import triton as rotary_triton
from varlen_graphs.kernels.rotary_table.op import rotary_table
from varlen_graphs.kernels.windows import reference as windows_reference
from varlen_graphs.kernels.windows import triton as windows_triton
from varlen_graphs.kernels.windows.op import cu_window_seqlens, window_index

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MODES = ["bilinear", "bicubic"]


@st.composite
def item_tables(draw):
    """An item table as an arena slices it, with items of no rows, extra columns and padding at its end, and capacity."""
    side = st.integers(1, 3).map(lambda n: 2 * n)
    items = draw(st.lists(st.just((0, 0, 0)) | st.tuples(st.integers(1, 3), side, side), max_size=4))
    arena = torch.full((len(items) + draw(st.integers(0 if items else 1, 2)) + 1, 5), 7)
    table = arena[: len(arena) - 1, : draw(st.integers(3, 5))]
    table[:, :3] = 0
    for index, item in enumerate(items):
        table[index, :3] = torch.tensor(item)
    rows = sum(t * h * w for t, h, w in items)
    return table.to(DEVICE), max(1, rows + draw(st.integers(0, 9)))


small = settings(max_examples=8)


@small
@given(item_tables(), st.integers(0, 20), st.booleans())
def test_cu_seqlens(case, spare, by_frame):
    table, _ = case
    segments = int(table[:, 0].sum()) + spare if by_frame else len(table) + spare
    got = cu_seqlens_triton.cu_seqlens(table, segments, by_frame)
    assert got.dtype == torch.int32
    assert torch.equal(got, cu_seqlens_reference.cu_seqlens(table, segments, by_frame))


@small
@given(item_tables(), st.integers(0, 20), st.data())
def test_cu_seqlens_of_groups(case, spare, data):
    """The first item begins a group, as padding does."""
    table, _ = case
    table = torch.cat([table, torch.ones_like(table[:, :1])], 1)
    last = max([0, *(table[:, 0] > 0).nonzero().flatten().tolist()])
    for item in range(1, last + 1):
        table[item, -1] = data.draw(st.integers(0, 1))
    arguments = (table, len(table) + spare, False, table.shape[1] - 1)
    assert torch.equal(cu_seqlens_triton.cu_seqlens(*arguments), cu_seqlens_reference.cu_seqlens(*arguments))


@small
@given(item_tables(), st.sampled_from(["h w", "t h w", "row", "w row t"]), st.sampled_from([1, 2]))
def test_positions(case, axes, merge):
    table, rows = case
    got = positions_triton.positions(table, rows, axes, merge)
    assert torch.equal(got, positions_reference.positions(table, rows, axes, merge))


@small
@given(item_tables(), st.integers(-3, 9), st.sampled_from([1, 2, 4, 6]))
def test_cu_window_seqlens(case, spare, side):
    table, _ = case
    segments = max(1, sum(t * -(-h // side) * -(-w // side) for t, h, w in table[:, :3].tolist()) + spare)
    got = windows_triton.cu_window_seqlens(table, segments, side)
    assert got.dtype == torch.int32
    assert torch.equal(got, windows_reference.cu_window_seqlens(table, segments, side))


@small
@given(item_tables(), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.booleans())
def test_window_index(case, merge, side, inverse):
    table, rows = case
    tokens = -(-rows // merge**2)
    got = windows_triton.window_index(table, tokens, merge, side, inverse)
    assert got.dtype == torch.int64
    assert torch.equal(got, windows_reference.window_index(table, tokens, merge, side, inverse))


@small
@given(
    item_tables(),
    st.sampled_from(["h w", "row", "t h w"]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 8]),
    st.data(),
)
def test_rotary_table(case, axes, merge, frequencies, data):
    table, rows = case
    side = data.draw(st.sampled_from([0, 1, 2]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    inv_freq = (torch.rand(frequencies, device=DEVICE) * 10).to(dtype)
    got = rotary_triton.rotary_table(table, rows, inv_freq, axes, merge, side)
    expected = rotary_reference.rotary_table(table, rows, inv_freq, axes, merge, side)
    active = int(table[:, :3].prod(1).sum())
    for a, b, at_rest in zip(got, expected, (1, 0), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-7)
        assert (a[active:] == at_rest).all()


@small
@given(item_tables(), st.sampled_from(MODES), st.booleans(), st.sampled_from([1, 2]), st.sampled_from([1, 2, 5]))
def test_interpolation_taps(case, mode, align_corners, merge, side):
    table, rows = case
    got = interpolation_triton.interpolation_taps(table, rows, side, mode, align_corners, merge)
    expected = interpolation_reference.interpolation_taps(table, rows, side, mode, align_corners, merge)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    ("mode", "dtype", "accum_dtype", "added", "merge", "side", "dim", "align_corners"),
    [
        ("bilinear", torch.float32, torch.float32, True, 2, 5, 130, False),
        ("bilinear", torch.float16, torch.float32, True, 1, 1, 5, True),
        ("bilinear", torch.float16, torch.float16, False, 2, 7, 72, True),
        ("bilinear", torch.float64, torch.float64, True, 1, 2, 5, False),
        ("bicubic", torch.float32, torch.float32, False, 1, 5, 5, True),
        ("bicubic", torch.float16, torch.float32, True, 2, 2, 72, False),
        ("bicubic", torch.float16, torch.float16, True, 1, 7, 5, True),
    ],
    ids=str,
)
def test_interpolation(mode, dtype, accum_dtype, added, merge, side, dim, align_corners):
    """The interpreter rounds bfloat16 down; tests on the GPU have it."""
    table = torch.tensor([[1, 2, 4], [2, 2, 2], [0, 0, 0]], device=DEVICE)
    entries = torch.randn(side * side, dim, device=DEVICE).to(dtype)
    add = torch.randn(17, dim, device=DEVICE).to(dtype) if added else None
    arguments = (entries, table, 17, mode, align_corners, merge, accum_dtype, add)
    got, expected = interpolation_triton.interpolate(*arguments), interpolation_reference.interpolate(*arguments)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("dtype", "accum_dtype", "side", "dim", "merge", "added"), [
    (torch.float32, torch.float32, 5, 130, 1, True),
    (torch.float32, torch.float32, 5, 130, 2, False),
    (torch.float32, torch.float32, 1, 5, 2, True),
    (torch.float16, torch.float32, 7, 72, 1, False),
    (torch.float16, torch.float32, 7, 72, 2, True),
    (torch.float64, torch.float64, 3, 5, 1, True),
    (torch.float64, torch.float64, 3, 5, 2, False),
])  # fmt: skip
def test_antialiased_interpolation(dtype, accum_dtype, side, dim, merge, added):
    table = torch.tensor([[1, 2, 4], [2, 2, 2], [1, 10, 2], [0, 0, 0]], device=DEVICE)
    entries = torch.randn(side * side, dim, device=DEVICE).to(dtype)
    add = torch.randn(41, dim, device=DEVICE).to(dtype) if added else None
    arguments = (entries, table, 41, merge, accum_dtype, add)
    got, expected = antialias_triton.antialias(*arguments), antialias_reference.antialias(*arguments)
    assert got.dtype == expected.dtype
    step = 2e-3 if dtype == torch.float16 else 2e-6  # in half precision a sum may be rounded the other way
    torch.testing.assert_close(got, expected, rtol=step, atol=step)
    assert added or not got[36:].any()


@settings(max_examples=8)
@given(item_tables(), st.sampled_from([1, 2]), st.integers(1, 6))
def test_antialiased_interpolation_of_any_items(case, merge, side):
    table, rows = case
    entries, add = torch.randn(side * side, 3, device=DEVICE), torch.randn(rows, 3, device=DEVICE)
    active = int(table[:, :3].prod(1).sum())
    add[active:] = torch.nan
    arguments = (entries, table, rows, merge, torch.float32, add)
    got, expected = antialias_triton.antialias(*arguments), antialias_reference.antialias(*arguments)
    torch.testing.assert_close(got[:active], expected[:active], rtol=2e-6, atol=2e-6)
    assert got[active:].isnan().all()
    assert expected[active:].isnan().all()


def test_what_padding_rows_hold_stays_there():
    table = torch.tensor([[1, 2, 2], [0, 0, 0]], device=DEVICE)
    add = torch.full((7, 3), torch.nan, device=DEVICE)
    add[:4] = 1
    got = interpolation_triton.interpolate(
        torch.zeros(9, 3, device=DEVICE), table, 7, "bicubic", False, 1, torch.float32, add
    )
    assert (got[:4] == 1).all()
    assert got[4:].isnan().all()


def test_a_sum_has_the_dtype_torch_gives_it():
    table = torch.tensor([[1, 2, 2]], device=DEVICE)
    entries, add = torch.randn(4, 3, device=DEVICE).half(), torch.randn(4, 3, device=DEVICE)
    arguments = (entries, table, 4, "bilinear", True, 1, torch.float32, add)
    got = interpolation_triton.interpolate(*arguments)
    assert got.dtype == torch.float32
    assert torch.equal(got, interpolation_reference.interpolate(*arguments))


def test_a_table_of_more_items_than_are_compared_at_a_time():
    table = torch.zeros(300, 3, dtype=torch.int64, device=DEVICE)
    table[:200] = torch.tensor([1, 1, 1])
    table[200:290, 0] = 1
    table[200:290, 1:] = torch.tensor([1, 2])
    assert torch.equal(
        positions_triton.positions(table, 400, "h w row", 1), positions_reference.positions(table, 400, "h w row", 1)
    )
    assert torch.equal(
        cu_seqlens_triton.cu_seqlens(table, 310, True), cu_seqlens_reference.cu_seqlens(table, 310, True)
    )
    assert torch.equal(
        windows_triton.cu_window_seqlens(table, 400, 1), windows_reference.cu_window_seqlens(table, 400, 1)
    )


def test_nothing_is_read_out_of_bounds_whatever_the_table_holds():
    table = torch.tensor([[-3, 5, 7], [2**40, 2**40, 2], [1, -1, -1], [2**62, 1, 3]], device=DEVICE)
    indices, _ = interpolation_triton.interpolation_taps(table, 64, 5, "bicubic", False, 2)
    assert ((indices >= 0) & (indices < 25)).all()
    assert (positions_triton.positions(table, 64, "t h w row", 2) >= 0).all()
    assert antialias_triton.antialias(torch.ones(25, 3, device=DEVICE), table, 64, 2, torch.float32).isfinite().all()
    for windows in (windows_triton, windows_reference):
        for inverse in (False, True):
            index = windows.window_index(table, 16, 2, 2, inverse)
            assert ((index >= 0) & (index < 16)).all()


TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
FLOATS = [*TOLERANCES]


@small
@given(
    item_tables(),
    st.sampled_from([2, 3, 14]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from(FLOATS),
)
def test_patches_of_any_images(case, size, channels, frames, strided, dtype):
    table, rows = case
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randint(0, 256, (rows, 2, size * size * channels), generator=generator, dtype=torch.uint8).to(DEVICE)
    images = wide[:, 0] if strided else wide[:, 0].contiguous()
    arguments = table, images, torch.rand(2, channels, generator=generator).to(DEVICE), size, frames, 2, dtype
    torch.testing.assert_close(
        patches_triton.patches(*arguments), patches_reference.patches(*arguments), atol=1e-5, rtol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize(
    "item", [(1, 4, 400), (1, -4, 4), (2**31, 2, 2), (3, 2**33, 2), (1, 10**9, 10**9), (2**40, 2**40, 2**40)]
)
def test_patches_of_items_that_are_not_there_read_nothing_beside_the_images(item):
    table, rows = torch.tensor([[1, 2, 2], [*item]], device=DEVICE), 20
    images = torch.randint(0, 256, (rows, 12), dtype=torch.uint8, device=DEVICE)
    out = patches_triton.patches(table, images, torch.ones(2, 3, device=DEVICE), 2, 1, 2, torch.float32)
    assert (out >= 1).all()
    assert (out <= 256).all()


def test_the_operators_keep_what_they_declare():
    table = torch.tensor([[1, 2, 4, 9], [2, 2, 2, 9], [0, 0, 0, 0]], device=DEVICE)
    entries, add = torch.randn(25, 6, device=DEVICE).bfloat16(), torch.randn(20, 6, device=DEVICE)
    taps = ("bicubic", True, 2)
    torch.library.opcheck(cu_seqlens, (table, 7, True))
    torch.library.opcheck(cu_seqlens, (table, 7, False, 3))
    torch.library.opcheck(positions, (table, 20, "t h w row", 2))
    images = torch.zeros(20, 12, dtype=torch.uint8, device=DEVICE)
    torch.library.opcheck(patches, (table, images, torch.rand(2, 3, device=DEVICE), 2, 2, 2, torch.float32))
    torch.library.opcheck(rotary_table, (table, 20, torch.rand(3, device=DEVICE), "h w", 2))
    torch.library.opcheck(rotary_table, (table, 20, torch.rand(3, device=DEVICE), "h w", 2, 4))
    torch.library.opcheck(cu_window_seqlens, (table, 7, 2))
    torch.library.opcheck(window_index, (table, 5, 2, 1, True))
    torch.library.opcheck(interpolation_taps, (table, 20, 5, *taps))
    torch.library.opcheck(interpolate, (entries, table, 20, *taps, torch.float32))
    torch.library.opcheck(interpolate, (entries, table, 20, *taps, torch.bfloat16, add))
    torch.library.opcheck(antialias, (entries, table, 20, 2, torch.float32))
    torch.library.opcheck(antialias, (entries, table, 20, 2, torch.float32, add))
