"""What a declaration or an option cannot be is refused where it is written, and by name."""

import dataclasses
import importlib
import re

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, attention_spec, encoder_of, rows_for
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.patches import Patches

ROW = torch.ones(1, 8)


def ones(*_):
    return torch.ones(1)


FREQUENCIES = torch.ones(2)

GOOD = {
    vg.Ladder: {"min": 256, "max": 512, "step": 1.1, "rows_per_item": 64, "rows_per_segment": 64, "memory": None},
    vg.budgets.PaddedLadder: {"batch": 4, "length": 64, "min_batch": 1, "min_length": 32, "step": 1.25},
    vg.layouts.Windows: {"side": 4},
    vg.GridTHW: {"name": "grid", "merge": 1, "columns": (), "prefix": 0},
    vg.layouts.GridHW: {"name": "sizes", "columns": (), "prefix": 0},
    vg.Batch: {"columns": (), "usual": (3, 16, 16)},
    vg.Lengths: {"name": "lengths", "columns": (), "prefix": 0, "padded": False},
    vg.Mask: {
        "name": "mask", "dtype": torch.int64, "real": True, "columns": (), "prefix": 0, "optional": False,
        "packed": False,
    },
    vg.layouts.PictureSizes: {"name": "sizes", "patch": 14},
    vg.layouts.PictureMask: {"name": "mask", "patch": 14, "whole": False},
    vg.layouts.PatchPositions: {"name": "positions", "merge": 1},
    vg.layouts.Column: {"name": "kind", "pad": 0, "function": None, "default": None},
    vg.layouts.NestedColumn: {"name": "kind", "pad": 0, "function": None, "default": None},
    vg.outputs.Rows: {"every": 1, "rows_dim": 0, "prefix": None},
    vg.outputs.Items: {"rows": 1, "rows_dim": 0},
    vg.outputs.Groups: {"rows": 1, "rows_dim": 0},
    vg.outputs.FrameRows: {"every": 1, "rows_dim": 0},
    vg.outputs.Entries: {"of_item": ones, "at_budget": ones, "rows_dim": 0},
    vg.outputs.GridEntries: {"of_item": ones, "at_budget": ones, "rows_dim": 0},
    vg.inputs.Rows: {
        "name": "x", "shape": (3,), "dtype": torch.uint8, "pad": 0, "rows_dim": 0, "strip": False,
        "normalize": Normalize([0.5], [0.5]), "padded_by": None,
    },
    Patches: {"normalize": Normalize([0.5], [0.5]), "size": 14, "frames": 2},
    Normalize: {"mean": (0.5,), "std": (0.5,), "rescale": 1 / 255},
    vg.inputs.PerRow: {"name": "y", "shape": (3,), "dtype": torch.int64, "default": None, "pad": 0, "rows_dim": 0},
    vg.inputs.PerItem: {"name": "y", "shape": (), "dtype": None, "default": 0.5, "pad": 0, "per_row": False},
    vg.inputs.PerCall: {"name": "y", "shape": (2,), "dtype": None, "default": None},
    vg.BufferSpec: {
        "rows": "x", "layout": vg.Lengths(), "buffers": (), "outputs": vg.outputs.Rows(), "inputs": (), "ignored": (),
    },
    vg.buffers.CuSeqlens: {"name": "cu_seqlens", "per": "item", "queries": None},
    vg.buffers.MaxSeqlen: {"name": "max_seqlen", "per": "item"},
    vg.buffers.GridPositions: {"name": "position_ids", "order": "raster", "axes": ("h", "w"), "largest": 64},
    vg.buffers.RotaryTable: {"name": "rotary", "inv_freq": "inv_freq", "axes": ("h", "w"), "order": "raster"},
    vg.buffers.Interpolation: {
        "name": "pos", "table": "pos", "mode": "bilinear", "align_corners": False, "order": "raster",
        "accum_dtype": torch.float32, "antialias": False,
    },
    vg.buffers.InterpolationIndices: {
        "name": "indices", "entries": 2304, "mode": "bilinear", "align_corners": False, "order": "raster",
    },
    vg.buffers.InterpolationWeights: {
        "name": "weights", "entries": 2304, "mode": "bilinear", "align_corners": False, "order": "raster",
        "padding": "zeros",
    },
    vg.buffers.AttentionMask: {
        "name": "mask", "per": "item", "causal": False, "window": (-1, 4), "dtype": torch.bool, "of_item": None,
    },
    vg.buffers.RelativePositionBias: {
        "name": "bias", "table": "bias", "index": ones, "axes": ("row",), "order": "raster", "largest": None,
    },
    vg.buffers.T5Buckets: {"buckets": 32, "max_distance": 128, "causal": False},
    vg.buffers.GridOffsets: {"height": 4, "width": 5},
    vg.buffers.Mask: {"name": "mask", "dtype": torch.bool, "real": True, "of_item": None},
    vg.buffers.PrefixIndex: {"name": "prefix_index", "per_item": False, "inverse": False},
    vg.buffers.Lookup: {"name": "n", "function": ones, "axes": ("h", "w"), "largest": 8},
    vg.buffers.SinCos: {"name": "p", "frequencies": FREQUENCIES, "axes": ("w", "h"), "largest": 8},
    vg.buffers.SinCosColumn: {"name": "p", "column": "kind", "frequencies": FREQUENCIES},
    vg.buffers.RowPositions: {"name": "position_ids", "largest": None},
    vg.buffers.WindowIndex: {"windows": vg.layouts.Windows(4), "name": "index", "inverse": False},
    vg.buffers.AttentionSchedule: {"heads": 2, "head_dim": 8, "name": "schedule", "per": "item", "queries": None},
    vg.buffers.DeviceBuffer: {"name": "b", "function": ones, "any_segments": True},
    vg.buffers.HostBuffer: {"name": "b", "function": ones, "shape": ("rows",), "dtype": torch.int64, "pad": 0, "per": None},
    vg.options.Capture: {"lazy": False, "compile": False, "on_change": "error", "warmup": None, "section": None, "on_bad_warmup": "ignore"},
    vg.options.Verify: {"calls": 0, "strict": False, "tolerance": None},
    vg.options.GpuLayouts: {"check": "reported", "min_segment_rows": 1},
    vg.budgets.Budget: {"rows": 64, "items": 4, "segments": 4, "max_seqlen": 64},
    vg.GraphedEncoder: {
        "module": torch.nn.Identity(), "budgets": [64], "buffer_spec": vg.BufferSpec("input", vg.Lengths()),
        "forward": None, "backend": "eager", "pool": None, "on_miss": "eager",
        "layouts": "reported", "eager_if": None, "memory": None, "capture": vg.options.Capture(), "verify": 0,
    },
}  # fmt: skip
"""All that declares something or takes options, with a good value for each field."""

NOT_DECLARED = {"Layout", "Input", "DefaultBudgets"}
"""Frozen dataclasses of the public face that are bases of others, or that the library makes itself."""

FIELDS = [(kind, name) for kind, good in GOOD.items() for name in good]

INTEGERS = [(kind, name) for kind, name in FIELDS if type(GOOD[kind][name]) is int and name not in ("pad", "limit")]

ODD = [
    None, 3, -1, 0, 2.5, True, "text", b"b", [], (), [1], {}, int, float("nan"), float("inf"), 10**400, 2**63, {1},
    torch.zeros(2), torch.int64, torch.float32, numpy.float32(3), numpy.array([1, 2]), range(3),
]  # fmt: skip


def test_all_declarations_of_the_public_face_are_tried():
    faces = [
        vg,
        *(
            importlib.import_module(f"varlen_graphs.{package}")
            for package in ("budgets", "buffers", "inputs", "layouts", "options", "outputs", "routing")
        ),
    ]
    public = {getattr(face, name) for face in faces for name in face.__all__}
    declared = {one for one in public if isinstance(one, type) and dataclasses.is_dataclass(one)}
    assert {one.__name__ for one in declared - GOOD.keys()} <= NOT_DECLARED


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_an_object_that_means_nothing_is_refused(kind, name):
    kind(**GOOD[kind])
    with pytest.raises(vg.errors.VarlenGraphsError) as refused:
        kind(**GOOD[kind] | {name: object()})
    assert "object" in str(refused.value)


@pytest.mark.parametrize("value", [2.5, 256.5, True, "3", 2**63])
@pytest.mark.parametrize(("kind", "name"), INTEGERS)
def test_what_is_no_integer_of_64_bits_is_refused_where_one_is_expected(kind, name, value):
    with pytest.raises(vg.errors.VarlenGraphsError):
        kind(**GOOD[kind] | {name: value})


@given(st.sampled_from(FIELDS), st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=5))
def test_no_value_of_a_field_raises_an_error_of_pythons_own(field, value):
    kind, name = field
    try:
        kind(**GOOD[kind] | {name: value})
    except vg.errors.VarlenGraphsError as error:
        assert len(str(error)) < 1500  # noqa: PT017 - not every value is wrong


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vg.buffers.CuSeqlens(per="image"), "CuSeqlens(per='image'): expected 'frame', 'item', 'clip', 'group' or a Win"),
        (lambda: vg.Ladder(256.5), "Ladder(min=256.5): expected an integer"),
        (lambda: vg.Ladder(memory="2XB"), "memory '2XB' has the unit 'XB': expected a number of bytes, or one with a unit"),
        (lambda: vg.layouts.Windows(2.5), "Windows(side=2.5): expected an integer of at least 1"),
        (lambda: vg.inputs.Rows("x", normalize=3), "Rows(normalize=3): expected a Normalize, a Patches or None"),
        (lambda: vg.inputs.Rows("x", (3,), strip=True), "expected rows_dim and shape, with the width of a row in shape"),
        (lambda: vg.inputs.Rows("x", (-1,)), "expected shape to be that of one row"),
        (lambda: vg.inputs.Rows("x", dtype=torch.uint8, pad=300), "Rows('x', pad=300): expected a value of torch.uint8"),
        (lambda: vg.inputs.Rows("x", dtype=torch.int64, pad=0.5), "pad=0.5): expected a value of torch.int64"),
        (lambda: vg.buffers.HostBuffer("b", ones, ("rows",), torch.int64, 0.5), "HostBuffer('b', pad=0.5): expected a value of torch"),
        (lambda: vg.layouts.Column("kind", function=3), "Column(function=3): expected a function or None"),
        (lambda: vg.buffers.Interpolation(antialias=True, mode="bicubic"), "antialias=True with mode='bicubic'"),
        (lambda: vg.buffers.Interpolation(accum_dtype=torch.int64), "accum_dtype=torch.int64: expected a floating dtype"),
        (lambda: vg.buffers.SinCos("p", torch.ones(2, 2)), "frequencies are torch.float32 [2, 2]: expected a floating tens"),
        (lambda: vg.buffers.InterpolationIndices(entries=10), "the position table has 10 entries: expected a square"),
        (lambda: vg.Ladder.auto("2GiB", 0), "bytes_per_row=0: expected a number above 0, or None"),
        (lambda: attention_encoder(pool=3), "pool=3: expected a Pool, such as vg.options.Pool(), or None"),
        (lambda: attention_encoder(forward=int), "does not tell its arguments: expected a Python function"),
        (lambda: encoder_of(torch.jit.trace(torch.nn.Linear(8, 8), ROW)), "Module.forward does not tell its arguments"),
        (lambda: attention_encoder(verify=True), "verify=True: expected the number of calls to verify for each budget"),
    ],
)  # fmt: skip
def test_what_used_to_be_found_later_is_found_at_once(make, message):
    with pytest.raises(vg.errors.VarlenGraphsError, match=re.escape(message)):
        make()


def test_integers_of_numpy_and_lists_are_as_good():
    counts = numpy.array([64, 128])
    assert attention_encoder(counts).budgets == (vg.budgets.Budget(64), vg.budgets.Budget(128))
    assert type(vg.budgets.Budget(counts[0]).rows) is int
    assert [*vg.Ladder(counts[0], counts[1])] == [*vg.Ladder(64, 128)]
    spec = attention_spec(layout=vg.Lengths(columns=[vg.layouts.Column("kind")]))
    encoder = attention_encoder(spec=spec, memory="1.5 GiB")
    assert encoder(rows_for([2]), lengths=[2], kind=[1]).shape == (2, 8)
    assert {vg.buffers.RotaryTable(axes=["h", "w"])} == {vg.buffers.RotaryTable(axes=("h", "w"))}


@pytest.mark.parametrize("model", [3, None, "model", torch.nn.Linear])
@pytest.mark.parametrize("function", [vg.wrap, vg.unwrap, vg.encoders])
def test_models_are_modules(function, model):
    with pytest.raises(vg.errors.SpecError, match=f"as model: expected a torch.nn.Module, not {type(model).__name__}"):
        function(model)


def test_costs_and_calls_to_verify_have_their_types():
    encoder = attention_encoder()
    with pytest.raises(vg.errors.SpecError, match="costs are of type int: expected the Costs"):
        encoder.costs = 3
    with pytest.raises(vg.errors.InputError, match="verify came with 3: expected a list of calls"):
        encoder.verify(3)
    with pytest.raises(vg.errors.BudgetError, match=re.escape("max_graphs=2.5: expected an integer of at least 1")):
        vg.traffic.plan(vg.traffic.Trace(), max_graphs=2.5)


def test_attention_of_something_else_than_tensors():
    q = torch.zeros(4, 1, 8)
    with pytest.raises(vg.errors.InputError, match="q is of type int: expected a tensor"):
        vg.varlen_attention(3, q, q, torch.tensor([0, 4], dtype=torch.int32), 4)
    with pytest.raises(vg.errors.InputError, match="cu_seqlens is of type list: expected a tensor"):
        vg.varlen_attention(q, q, q, [0, 4], 4)
    with pytest.raises(vg.errors.InputError, match=re.escape("max_seqlen=4.5")):
        vg.varlen_attention(q, q, q, torch.tensor([0, 4], dtype=torch.int32), 4.5)
