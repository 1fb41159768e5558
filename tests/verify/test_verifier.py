"""`encoder.verify`, and calls that are compared in service."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.clips import clips_encoder
from tests.support.encoders import (
    BUDGETS,
    UNVERIFIED,
    Attention,
    attention_encoder,
    attention_spec,
    encoder_of,
    rows_for,
)
from tests.support.threads import run_in_threads
from tests.support.towers import distance, pixels, qwen2_tower, qwen3_vl_tower, siglip2_tower
from tests.support.verifying import CALLS, WrongAt64, calls_of, refused
from varlen_graphs.verify import operations

POSITIONS = [vg.buffers.RowPositions("position_ids")]


# What is right


ROUNDING = 2**-20
"""Relative error of `Rounds`: exact in float32, well above what attention rounds and below its tolerance."""


class Rounds(Attention):
    """Attention whose graphs differ from an eager run by a known error, as if they rounded in another order."""

    def forward(self, x, cu_seqlens, max_seqlen):
        return super().forward(x, cu_seqlens, max_seqlen) * (1 + ROUNDING * (len(x) % 64 == 0))  # at all budgets


def test_a_sound_encoder_is_verified():
    encoder = attention_encoder(budgets=(*BUDGETS, vg.budgets.Budget(256, items=1)), module=Rounds())
    verified = encoder.verify(CALLS)
    assert verified.calls == 3
    assert verified.budgets == (*BUDGETS, vg.budgets.Budget(256, items=1))
    assert verified.unchecked == ()
    assert verified.error == pytest.approx(ROUNDING, rel=0.2)
    assert verified.error < verified.tolerance == 1e-5
    pattern = (
        r"3 calls verified in 3 budgets: largest error \d\.\de-0[67], tolerance 1e-05; compared with an eager run of.*"
    )
    assert re.fullmatch(pattern, str(verified))
    assert not encoder.stats.replays
    few = encoder.verify(CALLS[:1])
    assert few.unchecked == (BUDGETS[0], vg.budgets.Budget(256, items=1))
    assert "in 1 budget (2 unchecked): " in str(few)


def test_calls_that_are_split_are_verified_as_they_are_split():
    calls = calls_of([60, 50, 64, 3, 128], [100, 100])
    verified = attention_encoder().verify(calls)
    assert verified.budgets == BUDGETS


def test_calls_with_static_arguments_are_verified():
    encoder = attention_encoder()
    encoder(**CALLS[1])
    assert encoder.verify([call | {"scale": 2.0} for call in CALLS]).calls == 3
    assert distance(encoder(**CALLS[1]), encoder.eager(**CALLS[1])) < 1e-6


@settings(max_examples=10)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_calls_of_a_sound_encoder_are_verified(layouts):
    assert attention_encoder(budgets=[vg.budgets.Budget(160)]).verify(calls_of(*layouts)).error < 1e-6


def token_encoder():
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", shape=(), dtype=torch.int64),
        vg.Lengths(),
        buffers=[vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()],
    )

    class Text(Attention):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 8)

        def forward(self, x, cu_seqlens, max_seqlen):
            return super().forward(self.embed(x), cu_seqlens, max_seqlen)

    return vg.GraphedEncoder(Text(), BUDGETS, spec, backend="tape")


def test_integer_rows_are_verified():
    calls = [{"x": torch.randint(0, 50, (sum(lengths),)), "lengths": lengths} for lengths in ([30, 40], [3])]
    assert token_encoder().verify(calls).calls == 2


@pytest.mark.parametrize("outputs", [vg.outputs.Items(), vg.outputs.Items(rows=2, rows_dim=1)])
def test_outputs_an_item_columns_and_buffers_of_the_host_are_verified(outputs):
    """Of each item the sum of its rows, times what its column and the host say."""

    class Sums(nn.Module):
        def forward(self, x, item, kind, weight):
            sums = x.new_zeros(len(kind) + 1, 8).index_add(0, item, x * weight[:, None])[:-1] * kind[:, None]
            return sums if outputs.rows == 1 else sums.view(1, -1, 4)

    def item(table):
        return torch.where(table.row_active, table.row_item, table.budget.items)

    def weight(layout):
        return torch.tensor([1.0 / rows for rows in layout.rows for _ in range(rows)])

    spec = vg.BufferSpec(
        "x",
        vg.Lengths(columns=(vg.layouts.Column("kind"),)),
        [
            vg.buffers.DeviceBuffer("item", item),
            vg.buffers.HostBuffer("weight", weight, shape=("rows",), dtype=torch.float32),
        ],
        outputs,
    )
    encoder = vg.GraphedEncoder(Sums(), BUDGETS, spec, backend="tape")
    assert encoder.verify([call | {"kind": [*range(1, len(call["lengths"]) + 1)]} for call in CALLS]).calls == 3


def test_outputs_of_all_dtypes_are_verified():
    class Kinds(nn.Module):
        def forward(self, x):
            return {"complex": torch.complex(x, -x).conj(), "float8": x.to(torch.float8_e4m3fn), "bool": x > 0, "x": x}

    spec = vg.BufferSpec("x", vg.Lengths(), outputs=vg.outputs.Rows())
    assert vg.GraphedEncoder(Kinds(), BUDGETS, spec, backend="tape").verify(CALLS).error == 0


def test_groups_of_items_are_verified_and_kept_together():
    cases = [([(2, 3), (4, 4), (1, 5)], [[1, 2], [-1]]), ([(3, 3)], [-1]), ([(5, 5), (2, 2), (1, 1)], [3, [4, 5]])]
    calls = [{"x": rows_for([h * w for h, w in sizes]), "sizes": sizes, "times": times} for sizes, times in cases]
    assert clips_encoder().verify(calls).calls == 3


def test_padded_batches_are_verified():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(50, 8), nn.Linear(8, 8)

        def forward(self, ids, attention_mask):
            x = self.embed(ids)
            scores = (x @ x.mT).masked_fill(~attention_mask[:, None], -torch.inf)
            return self.mix(scores.softmax(-1) @ x)

    spec = vg.BufferSpec(vg.inputs.Rows("ids", shape=(), dtype=torch.int64), vg.Mask(dtype=torch.bool))
    budgets = [vg.budgets.Budget.padded(4, 16), vg.budgets.Budget.padded(4, 32), vg.budgets.Budget.padded(2, 8)]
    encoder = vg.GraphedEncoder(Text(), budgets, spec, forward=lambda m, **arguments: m(**arguments), backend="tape")
    ids, mask = torch.randint(1, 50, (3, 20)), torch.arange(20) < torch.tensor([[20], [4], [7]])
    assert (
        encoder.verify([{"ids": ids, "attention_mask": mask}, {"ids": ids[1:2], "attention_mask": mask[1:2]}]).calls
        == 2
    )


GRIDS = [[(1, 6, 12), (2, 12, 6)], [(1, 18, 24)]]
GRID_BUDGETS = [vg.budgets.Budget(256, items=8, segments=64), vg.budgets.Budget(512, items=8, segments=128)]


def check_tower(recipe, tower):
    encoder = recipe(tower, GRID_BUDGETS, backend="tape")
    calls = [{"hidden_states": pixels(grid), "grid_thw": torch.tensor(grid)} for grid in GRIDS]
    encoder(**calls[0])
    assert encoder.stats.replays.total() == 1
    assert "verified against the module itself" in encoder.report()
    assert encoder.verify(calls).budgets == encoder.budgets
    with torch.no_grad():
        tower.blocks[0].attn.qkv.weight.neg_()
    assert encoder.verify(calls).budgets == encoder.budgets


@pytest.mark.parametrize(
    ("recipe", "tower"),
    [(vg.recipes.qwen3_vl, qwen3_vl_tower), (vg.recipes.qwen2_5_vl, qwen2_tower)],
    ids=["qwen3_vl", "qwen2_5_vl"],
)
def test_a_recipe_is_held_against_the_tower_itself(recipe, tower):
    check_tower(recipe, tower())


def test_a_tower_without_a_recipe_is_held_against_itself():
    pytest.importorskip("transformers.exporters.utils", reason="towers take no arguments so in transformers 4")
    check_tower(vg.recipes.generic, qwen2_tower())


def test_a_recipe_of_padded_batches_is_held_against_the_tower_itself():
    encoder = vg.recipes.siglip2(siglip2_tower(), [vg.budgets.Budget(64)], backend="tape")
    mask = torch.arange(16) < torch.tensor([[16], [12]])
    call = {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": mask.long(),
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }
    assert encoder.verify([call]).calls == 1


# What is wrong


def test_the_operation_is_named_whatever_is_kept_at_a_time(monkeypatch):
    whole = refused(encoder_of(Pooled()))
    monkeypatch.setattr(operations, "MOST_BYTES", 1)
    assert refused(encoder_of(Pooled())) == whole


class Unmasked(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)
        return x + weights @ v


def test_attention_over_all_rows_is_named():
    message = refused(encoder_of(Unmasked(), verify=UNVERIFIED))
    assert "output of item 0, 2 rows, differs by inf from the module itself (tolerance 1e-05)" in message
    assert "The first operation with a wrong result at the budget is aten._softmax" in message
    assert "weights = (q @ k.mT).softmax(-1)" in message
    assert "in the module (Unmasked)" in message


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = Mean()

    def forward(self, x):
        return x * 2 - self.pool(x)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(0)


def test_a_mean_over_all_rows_is_named_with_its_module():
    message = refused(encoder_of(Pooled()))
    assert "aten.mean.dim" in message
    assert "in forward: return x.mean(0)" in message
    assert "in pool (Mean)" in message


def test_statistics_of_the_batch_are_named():
    message = refused(
        encoder_of(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)), forward=lambda m, x: m(x)
        )
    )
    assert "aten.native_batch_norm" in message
    assert "in 1 (BatchNorm1d)" in message


def test_what_padding_of_integer_rows_adds_is_named():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 8)

        def forward(self, x):
            embedded = self.embed(x)
            return embedded - embedded.sum(0)

    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(), dtype=torch.int64), vg.Lengths())
    encoder = vg.GraphedEncoder(Bag(), BUDGETS, spec, backend="tape")
    assert "aten.sum.dim_IntList" in refused(encoder, [{"x": torch.arange(7), "lengths": [3, 4]}])


def test_what_only_finite_padding_does_is_named():
    class Largest(nn.Module):
        def forward(self, x):
            return x + torch.where(x.abs() < 100, x, -100.0).amax(0) * 1e-9

    message = refused(encoder_of(Largest()), calls_of([60, 40, 3], [5, 9]))
    assert "the contents of padding change active rows" in message
    assert "The first operation whose active rows change with the padding is aten.amax" in message


LIMITS = SimpleNamespace(longest=4)
"""A global, which nothing watches."""


class Window(nn.Module):
    """Looks at so many rows of each item as a number of Python says."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x, position_ids):
        return self.weight * x * (position_ids < LIMITS.longest)[:, None]


def test_a_max_seqlen_frozen_at_capture_is_told_from_what_rows_mix(monkeypatch):
    encoder = encoder_of(Window(), POSITIONS).capture()
    monkeypatch.setattr(LIMITS, "longest", 60)  # as a caller does that knows its lengths
    message = refused(encoder)
    assert "Budget(rows=64" in message
    assert "gives the right output, so the graph holds a value that has changed since the capture" in message


def test_a_number_that_the_function_in_place_of_a_module_keeps_is_told():
    class Cut(nn.Module):
        def forward(self, x, lengths):
            ends = lengths.cumsum(0)
            starts = ends - lengths
            return torch.cat([x[a:b] * (torch.arange(b - a) < 64)[:, None] for a, b in zip(starts, ends, strict=True)])

    kept = {}

    def forward(module, x, position_ids):
        longest = kept.setdefault("longest", len(x) // 8)  # of the first run that there was
        return x * (position_ids < longest)[:, None]

    message = refused(encoder_of(Cut(), POSITIONS, forward=forward))
    assert "after a first call of few rows, and keeps something in 'forward.kept.longest'" in message


def test_a_cache_filled_at_capture_is_told():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, x, position_ids):
            if len(x) not in self.cache:
                self.cache[len(x)] = position_ids.float().sin()[:, None]
            return x + self.cache[len(x)]

    message = refused(encoder_of(Cached(), POSITIONS))
    assert "aten.add.Tensor" in message
    assert "return x + self.cache[len(x)]" in message


def test_state_that_changes_from_call_to_call_is_told():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return x * self.calls

    assert refused(encoder_of(Counts(), verify=UNVERIFIED)).startswith("the module changes calls in place")

    class Python(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    assert "The module itself gives a different output when the same call is repeated" in refused(
        encoder_of(Python(), verify=UNVERIFIED)
    )


def test_state_in_a_closure_is_named():
    seen = torch.zeros(8)

    def forward(module, x):
        seen.add_(1)
        return x + seen * 1e-9

    class Plain(nn.Module):
        def forward(self, x, lengths):
            return x.clone()

    message = refused(encoder_of(Plain(), forward=forward, verify=UNVERIFIED), calls_of([5]))
    assert "two replays of one call over the same memory differ" in message
    assert "The first operation whose result changes when it is repeated is aten.add_.Tensor" in message


def test_one_wrong_row_of_many_is_found():
    """Of an item of 4,000 rows it is less than what bfloat16 rounds off the whole of it."""

    class WrongRow(nn.Module):
        def forward(self, x):
            out = x * 1
            out[2000:2001] *= 1 + (len(x) > 4000)
            return out

    calls = [{"x": rows_for([4000]).bfloat16(), "lengths": [4000]}]
    encoder = encoder_of(
        WrongRow(), budgets=[vg.budgets.Budget(4096, items=1)], verify=vg.options.Verify(tolerance=3e-2)
    )
    with pytest.raises(vg.errors.VerificationError, match="item 0"):
        encoder.verify(calls)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.data())
def test_the_item_that_is_wrong_is_named_among_many_of_its_size(lengths, data):
    wrong = data.draw(st.integers(0, len(lengths) - 1))

    class WrongItem(nn.Module):
        def forward(self, x):
            out, start = x * 1, sum(lengths[:wrong])
            out[start : start + 1] *= 1 + (len(x) == 64)
            return out

    message = refused(
        encoder_of(WrongItem().eval(), budgets=[vg.budgets.Budget(64, items=12)], verify=UNVERIFIED), calls_of(lengths)
    )
    assert f"output of item {wrong}, {lengths[wrong]} row" in message


def test_what_only_other_rows_of_the_same_items_show_is_found():
    class Same(nn.Module):
        def forward(self, x, lengths):
            return x

    encoder = encoder_of(Same(), forward=lambda module, x: torch.where(x < 0.7, -x, x), verify=UNVERIFIED)
    with pytest.raises(vg.errors.VerificationError, match="from the module itself"):
        encoder.verify([{"x": torch.ones(5, 8), "lengths": [5]}])


def test_an_output_that_depends_on_the_order_of_items_is_found():
    def first(table):
        return (table.row_item == 0).float()[:, None]

    class Marked(nn.Module):
        def forward(self, x, first):
            return x + first

    message = refused(encoder_of(Marked(), [vg.buffers.DeviceBuffer("first", first)]), calls_of([5, 9]))
    assert "items in another order" in message


def test_weights_that_moved_are_found():
    encoder = attention_encoder(spec=attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))).capture()
    encoder.module.qkv.weight.data = encoder.module.qkv.weight.data.clone()
    with pytest.raises(vg.errors.StaleGraphError, match=r"qkv\.weight"):
        encoder.verify(CALLS)


@pytest.mark.parametrize(
    ("calls", "options", "message"),
    [
        ([], {}, "there are no calls to verify"),
        (calls_of([129]), {}, "no budget holds"),
        ([*CALLS, *calls_of([129])], {}, "no budget holds"),
        ([(torch.zeros(3, 8), [3])], {}, "verify came with a tuple as a call: expected a dict"),
        (CALLS, {"backend": "eager"}, "calls run eager now"),
        ([{"x": 3, "lengths": [3]}], {}, "x is a int"),
        (CALLS[0], {}, "verify came with one call, of 'x', 'lengths': expected a list of calls"),
    ],
)
def test_calls_that_cannot_be_verified_are_refused(calls, options, message):
    with pytest.raises(vg.errors.InputError, match=message):
        attention_encoder(**options).verify(calls)


def test_rows_that_are_being_written_are_not_poisoned():
    encoder = encoder_of(nn.Linear(8, 8), forward=lambda m, x: m(x))
    encoder(**CALLS[0])
    with encoder.stage([5, 9]) as stage:
        stage.rows.copy_(CALLS[1]["x"])
        with pytest.raises(vg.errors.InputError, match="this thread is writing rows"):
            encoder.verify(CALLS)
    assert distance(stage.output, encoder.eager(**CALLS[1])) < 1e-6


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -1, "1e-3"])
def test_a_tolerance_that_is_none_is_refused(tolerance):
    with pytest.raises(vg.errors.SpecError, match="expected a relative error of at least 0"):
        attention_encoder(verify=vg.options.Verify(tolerance=tolerance))
    with pytest.raises(vg.errors.SpecError, match="expected a relative error of at least 0"):
        attention_encoder().verify(CALLS, tolerance=tolerance)


def test_a_tolerance_may_be_given():
    encoder = attention_encoder(module=Rounds())
    with pytest.raises(vg.errors.VerificationError, match=r"tolerance 5e-07"):
        encoder.verify(CALLS, tolerance=ROUNDING / 2)
    assert encoder.verify(CALLS, tolerance=ROUNDING * 2).tolerance == ROUNDING * 2
    assert attention_encoder(verify=vg.options.Verify(tolerance=0.5)).verify(CALLS).tolerance == 0.5
    assert attention_encoder(module=Attention().bfloat16()).verify(CALLS).tolerance == 3e-2


# In service


def right(module, call):
    with torch.no_grad():
        return module.linear(call["x"])


def test_a_budget_that_is_wrong_is_out_of_use(caplog):
    encoder = encoder_of(WrongAt64(), verify=vg.options.Verify(2, at_capture=False))
    call = CALLS[1]
    with caplog.at_level(logging.WARNING, "varlen_graphs"):
        for _ in range(5):
            assert distance(encoder(**call), right(encoder.module, call)) < 1e-6
    assert encoder.stats.replays == {BUDGETS[0]: 1, BUDGETS[1]: 4}
    assert encoder.stats.checked == {BUDGETS[0]: 1, BUDGETS[1]: 2}
    assert encoder.stats.wrong.total() == encoder.stats.wrong[BUDGETS[0]] == 1
    assert not encoder.stats.eager
    [record] = caplog.records
    assert record.levelname == "ERROR"
    for evidence in ("Budget(rows=64", "is disabled", "1.0e+00", "tolerance 1e-05", "items [5 rows, 9 rows]"):
        assert evidence in record.getMessage()
    report = encoder.report()
    assert "disabled: output of item" in next(line for line in report.splitlines() if line.startswith("      64"))
    assert "3 replays verified against the module itself, 1 wrong" in report


def test_after_so_many_calls_nothing_is_compared():
    encoder = encoder_of(WrongAt64(), budgets=[128], verify=vg.options.Verify(2, at_capture=False))
    encoder.capture()
    before = encoder.module.runs
    for _ in range(5):
        encoder(**CALLS[1])
    assert encoder.module.runs - before == 2


def test_each_set_of_graphs_is_compared():
    encoder = attention_encoder(budgets=[64], verify=vg.options.Verify(1, at_capture=False))
    for scale in (1.0, 2.0, 1.0, 2.0):
        encoder(**CALLS[1], scale=scale)
    assert encoder.stats.checked.total() == 2


@pytest.mark.parametrize("on_miss", ["eager", "error"])
def test_without_a_budget_that_is_right_calls_run_eager(on_miss):
    encoder = encoder_of(WrongAt64(), budgets=[64], verify=vg.options.Verify(1, at_capture=False), on_miss=on_miss)
    for call in (CALLS[1], CALLS[1], CALLS[2]):
        assert distance(encoder(**call), right(encoder.module, call)) < 1e-6
    with encoder.stage([5, 9]) as stage:
        stage.rows.copy_(CALLS[1]["x"])
    assert distance(stage.output, right(encoder.module, CALLS[1])) < 1e-6
    assert encoder.stats.eager == {"its budget gave a wrong output": 3}
    encoder.release()
    encoder(**CALLS[1])
    assert encoder.stats.wrong[encoder.budgets[0]] == 2


def test_strict_calls_raise():
    encoder = encoder_of(WrongAt64(), verify=vg.options.Verify(1, strict=True, at_capture=False))
    with pytest.raises(vg.errors.VerificationError, match="is wrong and now disabled: output of item"):
        encoder(**CALLS[1])
    assert distance(encoder(**CALLS[1]), right(encoder.module, CALLS[1])) < 1e-6


def test_of_a_call_that_is_split_only_the_wrong_budget_is_out_of_use():
    encoder = encoder_of(WrongAt64(), verify=vg.options.Verify(1, at_capture=False))
    call = calls_of([120, 60])[0]
    for _ in range(2):
        assert distance(encoder(**call), right(encoder.module, call)) < 1e-6
    assert encoder.stats.replays == {BUDGETS[0]: 1, BUDGETS[1]: 3}
    assert encoder.stats.wrong.total() == 1


def test_items_that_only_the_device_has_seen_are_compared():
    encoder = encoder_of(WrongAt64(), verify=vg.options.Verify(1, at_capture=False))
    call = CALLS[1] | {"lengths": torch.tensor(CALLS[1]["lengths"])}
    for _ in range(3):
        assert distance(encoder(**call), right(encoder.module, call)) < 1e-6
    assert encoder.stats.replays == {BUDGETS[0]: 1, BUDGETS[1]: 2}
    fresh = encoder_of(WrongAt64(), verify=vg.options.Verify(1, at_capture=False))
    assert fresh(CALLS[1]["x"], lengths=torch.tensor([5, 8])).isnan().all()
    with pytest.raises(vg.errors.LayoutError, match="call 1 of those with lengths on the GPU was wrong"):
        fresh.check()
    assert not fresh.stats.checked


def test_stages_are_compared():
    encoder = encoder_of(WrongAt64(), verify=vg.options.Verify(1, at_capture=False))
    for _ in range(3):
        with encoder.stage([5, 9]) as stage:
            stage.rows.copy_(CALLS[1]["x"])
        assert distance(stage.output, right(encoder.module, CALLS[1])) < 1e-6
    assert encoder.stats.checked == {BUDGETS[0]: 1, BUDGETS[1]: 1}
    assert encoder.stats.replays[BUDGETS[1]] == 2


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, lengths):
        return self.linear(x) * 2


def test_where_the_function_in_place_of_a_module_is_wrong_the_module_answers(caplog):
    encoder = encoder_of(
        Doubled(), verify=vg.options.Verify(1, at_capture=False), forward=lambda module, x: module.linear(x)
    )
    for call in CALLS:
        assert distance(encoder(**call), right(encoder.module, call) * 2) < 1e-6
    with encoder.stage(torch.tensor([5, 9])) as stage:
        stage.rows.copy_(CALLS[1]["x"])
    assert distance(stage.output, right(encoder.module, CALLS[1]) * 2) < 1e-6
    assert "an eager run of the declared buffers and forward= is wrong too" in caplog.text
    assert encoder.report().count("disabled: wrong in eager runs too: output of item") == 2
    assert encoder.stats.replays.total() == 1


def test_nan_of_the_callers_own_is_no_mistake():
    encoder = encoder_of(nn.Linear(8, 8), verify=vg.options.Verify(1, at_capture=False), forward=lambda m, x: m(x))
    rows = rows_for([5, 9]).index_fill(0, torch.tensor([3]), torch.nan)
    assert encoder(rows, lengths=[5, 9]).isnan().any(1).tolist() == [i == 3 for i in range(14)]
    assert not encoder.stats.wrong.total()


def test_a_call_that_the_module_refuses_is_compared_with_the_declared_forward_and_told():
    class Refuses(Doubled):
        def forward(self, x, lengths):
            raise RuntimeError("no memory")

    def forward(module, x):
        return module.linear(x)

    encoder = encoder_of(Refuses(), verify=vg.options.Verify(1, at_capture=False), forward=forward)
    assert distance(encoder(**CALLS[1]), right(encoder.module, CALLS[1])) < 1e-6
    assert "1 replay verified against an eager run of the declared forward (the module" in encoder.report()
    assert "against the module itself" not in encoder.report()


def test_threads_get_right_outputs_while_a_budget_goes_out_of_use():
    encoder = encoder_of(WrongAt64(), verify=vg.options.Verify(2, at_capture=False))
    expected, worst = right(encoder.module, CALLS[1]), []

    def work(number):
        worst.append(max(distance(encoder(**CALLS[1]), expected) for _ in range(5)))

    run_in_threads(work)
    assert len(worst) == 4
    assert max(worst) < 1e-6


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(1, 128), min_size=1, max_size=6), min_size=1, max_size=4))
def test_whatever_calls_come_none_is_answered_wrongly(layouts):
    assume(all(sum(lengths) != 64 for lengths in layouts))  # of which the module itself gives the double
    encoder = encoder_of(WrongAt64(), verify=vg.options.Verify(1, at_capture=False))
    for call in calls_of(*layouts):
        assert distance(encoder(**call), right(encoder.module, call)) < 1e-6
    assert encoder.stats.wrong.total() == len(encoder.disabled)


def test_recipes_take_the_options():
    tower = qwen3_vl_tower()
    encoder = vg.recipes.qwen3_vl(
        tower, [256], backend="tape", verify=vg.options.Verify(1, strict=True, at_capture=False)
    )
    grid = [(1, 6, 12)]
    encoder(pixels(grid), grid_thw=torch.tensor(grid))
    assert encoder.stats.checked.total() == 1
    model = vg.wrap(tower, [256], backend="tape", verify=vg.options.Verify(1, strict=True, at_capture=False))
    model(pixels(grid), grid_thw=torch.tensor(grid))
    assert vg.encoders(model)[""].stats.checked.total() == 1


@pytest.mark.parametrize("verify", [-1, 0.5, "all"])
def test_a_number_of_calls_that_is_none_is_refused(verify):
    with pytest.raises(vg.errors.SpecError, match="expected the number of calls to verify for each budget"):
        attention_encoder(verify=verify)


def test_padding_of_all_replays_of_a_call_is_tried_and_none_of_it_stays():
    """Each pack of a split call; and after an error, the next call finds zeros again."""

    class Leaks(nn.Module):
        def forward(self, x):
            return x + ((x == 7).any() if len(x) == 128 else 0)

    rows = vg.inputs.Rows("x", shape=(8,))
    encoder = vg.GraphedEncoder(
        Leaks(),
        [64, 128],
        vg.BufferSpec(rows, vg.Lengths()),
        backend="tape",
        verify=vg.options.Verify(at_capture=False),
    )
    call = {"x": torch.full((134, 8), 7.0), "lengths": [64, 70]}
    with pytest.raises(vg.errors.VerificationError, match="of item"):
        encoder.verify([call])
    assert not encoder(torch.zeros(100, 8), lengths=[100]).any()
    encoder.poison()
    assert not encoder(torch.zeros(100, 8), lengths=[100]).any()
