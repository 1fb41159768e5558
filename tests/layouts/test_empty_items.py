"""Items of no rows are the module's business, and what lies on the CPU is read there, whatever replays the graph."""

import itertools
import re

import numpy
import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.empty_items import EMPTY, WITH_EMPTY, check_empty_segments
from tests.support.encoders import ON_GPU, SIMULATED, attention_encoder, attention_spec, rows_for
from tests.support.prefixed import prefixed
from tests.support.towers import distance, equal_bits


@pytest.mark.parametrize("lengths", WITH_EMPTY, ids=str)
def test_an_item_of_no_rows_is_an_empty_segment_on_the_host_and_on_the_device(lengths):
    check_empty_segments(lengths, **SIMULATED)


def test_items_of_no_frames_height_or_width_have_no_segments():
    spec = attention_spec(
        rows=vg.inputs.Rows("x", (8,)),
        layout=vg.GridTHW(merge=2),
        buffers=[vg.buffers.CuSeqlens(per="frame"), vg.buffers.MaxSeqlen(per="frame")],
    )
    encoder, rows = attention_encoder([vg.budgets.Budget(64, items=8, segments=16)], spec=spec), rows_for([24])
    expected = encoder(rows, grid_thw=[(1, 4, 4), (2, 2, 2)])
    for empty in itertools.product((0, 2), (0, 4), (0, 6)):
        if 0 in empty:
            grid = [(1, 4, 4), empty, (2, 2, 2)]
            assert equal_bits(encoder(rows, grid_thw=torch.tensor(grid)), expected)
            assert distance(encoder(rows, grid_thw=grid), expected) < 1e-5
    encoder.check()
    assert encoder(rows, grid_thw=torch.tensor([(1, 4, 4), (2**40, 0, 2**50), (2, 2, 2)])).isfinite().all()
    assert encoder(rows, grid_thw=torch.tensor([(1, 4, 4), (2, -1, 0), (2, 2, 2)])).isnan().all()


def test_a_budget_holds_what_the_device_may_have_in_one_item_beside_empty_ones():
    encoder = attention_encoder([vg.budgets.Budget(64, items=4, max_seqlen=62)])
    rows, lengths = rows_for([64]), [64, 0, 0]
    got = encoder(rows, lengths=torch.tensor(lengths))
    encoder.check()
    assert distance(got, encoder.eager(rows, lengths=lengths)) < 1e-5


def test_a_call_of_no_rows_is_answered_where_the_module_answers_it():
    encoder = attention_encoder()
    assert encoder(torch.ones(0, 8), lengths=torch.tensor([0, 0])).shape == (0, 8)
    encoder.check()
    for lengths in ([0, 0], numpy.array([0, 0])):
        with pytest.raises(
            vg.errors.LayoutError, match=re.escape("lengths[0] has no rows, while the call has no rows at all")
        ):
            encoder(torch.ones(0, 8), lengths=lengths)


def test_the_module_itself_answers_where_it_takes_the_call():
    class Original(nn.Linear):
        def forward(self, x, lengths):
            return super().forward(x) + len(lengths)

    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths())
    module = Original(8, 8).eval()
    encoder = attention_encoder(module=module, spec=spec, forward=lambda module, x: nn.Linear.forward(module, x))
    rows = rows_for([6])
    with torch.no_grad():
        assert equal_bits(encoder(rows, lengths=[6, 0]), module(rows, torch.tensor([6, 0])))
        assert equal_bits(encoder(rows[:0], lengths=[0]), module(rows[:0], torch.tensor([0])))


def test_padded_items_that_are_all_padding_run_eager():
    class Pooled(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) * mask[..., None], mask.sum(1)

    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Mask("mask"), outputs=(vg.outputs.Rows(), vg.outputs.Items()))
    encoder = attention_encoder([vg.budgets.Budget.padded(4, 8)], Pooled(8, 8).eval(), spec)
    x = torch.randn(3, 5, 8)
    mask = torch.arange(5) < torch.tensor([[5], [0], [3]])
    with torch.no_grad():
        expected = encoder.module(x, mask.long())
    for got, output in zip(encoder(x, mask=mask), expected, strict=True):
        assert distance(got.float(), output.float()) < 1e-6
    assert encoder.stats.eager == {EMPTY: 1}


def test_stages_of_items_without_rows_run_eager():
    encoder = attention_encoder(spec=attention_spec(rows=vg.inputs.Rows("x", (8,))))
    with encoder.stage([6, 0]) as stage:
        stage.rows.copy_(rows_for([6]))
    assert distance(stage.output, encoder.eager(rows_for([6]), lengths=[6])) < 1e-5
    assert encoder.stats.eager == {EMPTY: 1}


def test_traces_count_no_items_without_rows(tmp_path):
    encoder = attention_encoder()
    with encoder.record() as trace:
        encoder(rows_for([6]), lengths=[4, 0, 2, 0, 0, 0, 0])
    trace.save(tmp_path / "trace.json")
    (size,) = vg.traffic.Trace.load(tmp_path / "trace.json").calls
    assert (size.rows, size.items) == (6, 2)


def test_no_item_is_without_rows_where_each_has_prefix_rows():
    encoder = prefixed(layouts=ON_GPU)
    x = torch.randn(6, 8)
    with pytest.raises(
        vg.errors.LayoutError, match=r"sizes\[1\] has no rows, while each item has \d+ prefix rows of its own"
    ):
        encoder(x, sizes=[(2, 3), (0, 4)])
    assert encoder(x, sizes=torch.tensor([(2, 3), (0, 4)]))["kept"].isnan().all()
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("sizes[1] has a size of 0: every size must be at least 1; drop")
    ):
        encoder.check()


BAD = {
    "too many rows": (vg.Lengths("items"), [6, 5], "items describes 2 items of 11 rows in all, but x has 10 rows"),
    "negative": (vg.Lengths("items"), [12, -2], "items[1] is -2: every size must be at least 0"),
    "an odd side": (vg.GridTHW("items", merge=2), [(1, 2, 5)], "h and w must be divisible by the merge size 2"),
    "other rows": (vg.layouts.GridHW("items"), [(3, 3)], "items describes 1 item of 9 rows in all, but x has 10 rows"),
}


@pytest.mark.parametrize("backend", ["tape", "eager"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("layout", "items", "message"), BAD.values(), ids=BAD.keys())
def test_bad_items_in_a_tensor_on_the_cpu_raise_at_once(backend, dtype, layout, items, message):
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), layout)
    encoder = vg.GraphedEncoder(nn.Linear(8, 8).eval(), [64], spec, forward=lambda m, x: m(x), backend=backend)
    for value in (items, torch.tensor(items, dtype=dtype)):
        with pytest.raises(vg.errors.LayoutError, match=re.escape(message)):
            encoder(rows_for([10]), items=value)
    encoder.check()
    assert encoder.stats.wrong_layouts == 0


def test_recordings_count_no_items_without_rows():
    encoder = attention_encoder()
    with encoder.record() as trace:
        encoder(rows_for([5, 4]), lengths=[5, 4])
        encoder(rows_for([5, 4]), lengths=[5, 0, 4, 0])
    assert len(trace.calls) == 1
    assert trace.calls.total() == 2
