"""`GraphedEncoder.stage` and layouts that only the device has seen: where rows, items and outputs go."""

import ctypes
import re
import threading

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import varlen_graphs as vg
from tests.support.contract import UNCOMMON, check_outputs_of_all_kinds, check_uncommon_dtypes
from tests.support.encoders import SIMULATED, UNVERIFIED, Attention, attention_encoder, attention_spec, rows_for
from tests.support.threads import run_in_threads
from tests.support.towers import distance, equal_bits
from varlen_graphs.capture import memory

SHAPED = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))


@pytest.fixture(scope="module")
def encoder():
    """An encoder for all examples of a property."""
    return attention_encoder()


# Outputs where graphs leave them


def test_outputs_that_are_inputs_weights_or_views_are_right():
    class Several(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            y = super().forward(x, cu_seqlens, max_seqlen)
            wide = torch.cat([y, y], 1)
            weight = self.qkv.weight[:1, :8].expand(len(x), 8)
            return {"in": x, "view": wide[:, 3:11], "across": wide.mT.mT, "weight": weight, "kinds": x[:, 0].long()}

    outputs = vg.outputs.Fields(**dict.fromkeys(["in", "view", "across", "weight", "kinds"], vg.outputs.Rows()))
    module = Several()
    encoder = attention_encoder(module=module, spec=attention_spec(outputs=outputs))
    for lengths in ([100], [3, 4], [100, 20, 90, 30, 5, 128, 64], [60]):
        rows = rows_for(lengths, len(lengths))
        got = encoder(rows, lengths=lengths)
        encoder.poison()
        assert equal_bits({"in": got["in"]}, {"in": rows})
        assert torch.equal(got["kinds"], rows[:, 0].long())
        assert distance(got, encoder.eager(rows, lengths=lengths)) < 1e-5
        for tensor in got.values():
            tensor.zero_()
    assert module.qkv.weight.abs().min() > 0


def test_outputs_of_all_kinds_are_the_same_wherever_the_layout_comes_from():
    check_outputs_of_all_kinds("tape", "cpu")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", UNCOMMON, ids=str)
def test_rows_and_outputs_of_uncommon_dtypes_are_copied_bit_for_bit(dtype):
    check_uncommon_dtypes("tape", "cpu", dtype)


def test_what_a_capture_allocated_is_left_to_the_pool_and_the_rest_is_held(monkeypatch):
    """With the memory of an array in place of a pool's."""
    aliased = []

    def device_bytes(address, size):
        aliased.append(size)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(memory, "device_bytes", device_bytes)
    pool, weight = numpy.arange(64, dtype=numpy.float32), torch.randn(4, 8)

    def run():
        x = torch.from_numpy(pool).view(8, 8)
        return [x, x[2:, 3:6], x.mT, x.view(torch.int32), weight[:1].expand(5, 8), torch.empty(0, 3)]

    expected = [output.clone() for output in run()]
    got = memory.release_to_pool(run())
    pool[:8] += 1
    assert aliased == [256] * 4
    assert got[0][0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    pool[:8] -= 1
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    weight.zero_()
    assert not got[4].any()


@pytest.mark.parametrize(
    ("least", "sizes"),
    [(0, ".*32.* and .*48"), (100, ".*256.* and .*128")],  # at the first look, at two sizes, and at a later budget
)
def test_outputs_whose_entries_depend_on_the_budget_are_refused(least, sizes):
    class Wide(nn.Module):
        def forward(self, x):
            return x.new_ones(len(x), max(least, len(x)))

    encoder = vg.GraphedEncoder(Wide(), [128, 256], vg.BufferSpec("x", vg.Lengths()), backend="tape")
    with pytest.raises(vg.errors.SpecError, match="the entries of the outputs depend on the budget: " + sizes):
        encoder(torch.ones(2, 1), lengths=[2])


def test_rebuilt_model_outputs_are_whole():
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    class Model(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            return BaseModelOutputWithPooling(
                last_hidden_state=super().forward(x, cu_seqlens, max_seqlen), hidden_states=(x, x)
            )

    outputs = vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), hidden_states=vg.outputs.Rows())
    encoder = attention_encoder(module=Model(), spec=attention_spec(outputs=outputs))
    rows = rows_for([6])
    got, expected = encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])
    assert type(got) is type(expected)
    assert list(got.keys()) == list(expected.keys()) == ["last_hidden_state", "hidden_states"]
    assert vars(got).keys() == vars(expected).keys()
    assert got.pooler_output is None
    assert got.last_hidden_state is got["last_hidden_state"] is got[0] is got.to_tuple()[0]
    assert torch.utils._pytree.tree_map(lambda x: x, got).keys() == got.keys()


# Weights


def many_weights():
    class Deep(Attention):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(40))

        def forward(self, x, cu_seqlens, max_seqlen):
            return super().forward(x, cu_seqlens, max_seqlen) + self.layers[7](x)

    return Deep()


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        (lambda m: m.double(), 1),
        (lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True), 1),
        (lambda m: m.layers.append(nn.Linear(8, 8)), 1),
        (lambda m: setattr(m.layers[7].weight, "data", m.layers[7].weight.data.clone()), 64),
        (lambda m: setattr(m.layers[39], "bias", None), 64),
        (lambda m: m.layers.__setitem__(20, nn.Linear(8, 8)), 1),
    ],
)
def test_a_change_of_all_weights_is_found_at_once_and_of_one_soon(change, calls):
    encoder, rows = attention_encoder(budgets=[64], module=many_weights()), rows_for([6])
    encoder(rows, lengths=[6])
    change(encoder.module)
    with pytest.raises(
        vg.errors.StaleGraphError,
        match=r"(was moved or replaced|gained or lost a parameter, buffer or submodule) since the graphs were captured",
    ):
        _ = [encoder(rows, lengths=[6]) for _ in range(calls)]
    encoder.release()
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6


def test_hooks_are_seen_whenever_they_come():
    encoder, rows = attention_encoder(), rows_for([6])
    for _ in range(3):
        encoder(rows, lengths=[6])
    for register in (encoder.module.qkv.register_forward_hook, nn.modules.module.register_module_forward_hook):
        seen = []
        hook = register(lambda *args, seen=seen: seen.append(1))
        encoder(rows, lengths=[6])
        encoder(rows, lengths=[6])
        hook.remove()
        assert len(seen) >= 2
        encoder(rows, lengths=[6])
    assert encoder.stats.eager == {"forward hooks": 4}


# Stages


def test_rows_may_be_written_in_place():
    encoder = attention_encoder(spec=SHAPED)
    for lengths in ([5, 9], torch.tensor([60, 60]), (1,)):
        rows = rows_for(list(lengths))
        with encoder.stage(lengths) as stage:
            assert stage.rows.shape == rows.shape
            stage.rows.copy_(rows)
        assert equal_bits(stage.output, encoder(rows, lengths=lengths))
        assert stage.output is stage.output
    assert encoder.stats.calls == 6
    assert encoder.stats.replays.total() == 6


def test_the_output_of_a_stage_is_computed_when_it_is_read_and_is_the_callers_own():
    encoder, rows = attention_encoder(spec=SHAPED), rows_for([5, 9])
    with encoder.stage([5, 9], scale=2.0) as stage:
        stage.rows[:] = rows
        first = stage.output
        with pytest.raises(
            vg.errors.InputError, match=re.escape("stage.rows was read after stage.output or after the block")
        ):
            stage.rows.zero_()
        encoder(rows_for([64], 1), lengths=[64])  # the rows were taken, so others may come
        assert stage.output is first
    with pytest.raises(vg.errors.InputError, match="write the rows before that"):
        _ = stage.rows
    assert equal_bits(first, encoder(rows, lengths=[5, 9], scale=2.0))
    assert encoder.stats.replays.total() == 3


def test_an_error_inside_a_stage_leaves_everything_working():
    encoder, rows = attention_encoder(spec=SHAPED), rows_for([5])
    with pytest.raises(ZeroDivisionError), encoder.stage([5]) as stage:
        stage.rows.fill_(1 / 0)
    with pytest.raises(vg.errors.InputError, match="an error ended the block before it was computed; stage again"):
        _ = stage.output
    assert not encoder.stats.replays
    assert distance(encoder(rows, lengths=[5]), encoder.eager(rows, lengths=[5])) < 1e-6


def test_other_calls_wait_for_a_stage_and_those_of_its_own_thread_are_refused():
    encoder, rows = attention_encoder(spec=SHAPED), rows_for([5])
    expected, done = encoder(rows, lengths=[5]), []
    other = attention_encoder(pool=encoder.pool)
    with encoder.stage([5]) as stage:
        stage.rows.copy_(rows)
        for call in (lambda: encoder(rows, lengths=[5]), encoder.release, lambda: encoder.stage([4]).__enter__()):
            with pytest.raises(vg.errors.InputError, match="this thread is writing rows inside `with"):
                call()
        assert distance(other(rows, lengths=[5]), expected) < 1e-6  # rows of its own
        thread = threading.Thread(target=lambda: done.append(encoder(rows, lengths=[5])))
        thread.start()
        thread.join(timeout=0.3)
        assert not done
    thread.join()
    assert equal_bits(done[0], expected)
    assert equal_bits(stage.output, expected)


def test_a_stage_runs_eager_where_calls_do():
    rows = rows_for([5])
    for backend in ("eager", "tape"):
        encoder = attention_encoder(spec=SHAPED, backend=backend)
        hook = encoder.module.qkv.register_forward_hook(lambda *args: None)
        with encoder.stage([5]) as stage:
            stage.rows.copy_(rows)
        assert equal_bits(stage.output, encoder.eager(rows, lengths=[5]))
        assert encoder.stats.eager == {"forward hooks": 1}
        hook.remove()
        with encoder.stage([5]) as stage:
            stage.rows.copy_(rows)
        assert distance(stage.output, encoder.eager(rows, lengths=[5])) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ([64, 65],),
            vg.errors.BudgetError,
            "a stage is one replay, but no budget holds 2 items of 129 rows in 2 segments of at most 65 rows:",
        ),
        (([-1],), vg.errors.LayoutError, "every size must be at least 0"),
        (([5], {"scales": 1}), vg.errors.InputError, "Attention has no argument 'scales'"),
        (([5], {"x": 1}), vg.errors.InputError, "x came with a stage, which hands out the rows to write; leave it out"),
        ((None,), vg.errors.InputError, "argument 'lengths' is missing"),
    ],
)
def test_stages_that_cannot_be_are_named(arguments, error, message):
    layout, others = (*arguments, {})[:2]
    with pytest.raises(error, match=re.escape(message)), attention_encoder(spec=SHAPED).stage(layout, **others):
        pass


def test_a_stage_needs_the_shape_of_a_row():
    encoder = attention_encoder()
    with pytest.raises(vg.errors.SpecError, match="or make a call instead"), encoder.stage([5]):
        pass
    encoder(rows_for([5]), lengths=[5])
    with encoder.stage([5]) as stage:
        stage.rows.zero_()
    assert stage.output.shape == (5, 8)


def test_padding_of_staged_integer_rows_is_the_declared_one():
    class Sum(nn.Module):
        def forward(self, ids, lengths):
            return ids.sum().expand(len(lengths))

    spec = vg.BufferSpec(vg.inputs.Rows("ids", shape=(), dtype=torch.int64), vg.Lengths(), outputs=vg.outputs.Items())
    weight = nn.Parameter(torch.zeros(1))
    module = Sum()
    module.register_parameter("weight", weight)
    encoder = vg.GraphedEncoder(module, [128], spec, backend="tape")
    encoder(torch.full((100,), 7), lengths=[100])
    with encoder.stage([3, 4]) as stage:
        stage.rows.fill_(2)
    assert stage.output.tolist() == [14, 14]


# Layouts that only the device has seen. On the tape any tensor is on the device.


@settings(max_examples=30)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_a_layout_on_the_device_is_as_good_as_one_on_the_host(encoder, lengths):
    rows, items, active = rows_for(lengths), encoder.stats.items, encoder.stats.rows
    expected = encoder.eager(rows, lengths=lengths)
    for dtype in (torch.int64, torch.int32):
        assert distance(encoder(rows, lengths=torch.tensor(lengths, dtype=dtype)), expected) < 1e-5
    encoder.check()
    assert encoder.stats.items == items + 2 * len(lengths)
    assert encoder.stats.rows == active + 2 * sum(lengths)


GRID_BUDGETS = (vg.budgets.Budget(64, items=4, segments=16),)


def grid_encoder(budgets=GRID_BUDGETS, **options):
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("x", shape=(8,)),
        layout=vg.GridTHW(merge=2, columns=(vg.layouts.Column("kind", pad=-1),)),
        buffers=[
            vg.buffers.CuSeqlens(per="frame"),
            vg.buffers.MaxSeqlen(per="frame"),
            vg.buffers.DeviceBuffer("scale", lambda table: table.column("kind")[table.row_item][:, None]),
        ],
        outputs=vg.outputs.Fields(x=vg.outputs.Rows(), whole=vg.outputs.Rows()),
    )

    def forward(module, x, cu_seqlens, max_seqlen, scale):
        return {"x": module(x, cu_seqlens, max_seqlen, scale), "whole": torch.arange(len(x), device=x.device)}

    return vg.GraphedEncoder(Attention(), budgets, spec, forward=forward, verify=UNVERIFIED, **(SIMULATED | options))


WRONG = {
    "rows": ([(1, 2, 4), (1, 4, 4)], 20, "grid_thw describes more rows in all, but 20 came; pass all rows of exactly"),
    "fewer rows": ([(1, 2, 4)], 20, "grid_thw describes 8 rows in all, but 20 came"),
    "a size": ([(1, 4, 4), (-1, 2, 2)], 16, "grid_thw[1] has a size of -1: every size must be at least 0"),
    "a huge size": ([(2**62, 4, 4)], 16, "grid_thw describes more rows in all, but 16 came"),
    "merge": ([(1, 2, 2), (1, 3, 4)], 16, "grid_thw[1] has a side of 3: h and w must be divisible by the merge size 2"),
}


@pytest.mark.parametrize(("grid", "count", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_layout_on_the_device_gives_nan_and_harms_no_other_call(grid, count, message, caplog):
    encoder, rows = grid_encoder(), rows_for([count])
    right = {"grid_thw": torch.tensor([(1, 4, 4)]), "kind": torch.tensor([3])}
    expected = encoder(rows[:16], **right)
    for wrong in (1, 2, 3):
        for _ in range(2):
            out = encoder(rows, grid_thw=torch.tensor(grid), kind=torch.tensor([1] * len(grid)))
            assert out["x"].shape == rows.shape
            assert out["x"].isnan().all()
        assert equal_bits(encoder(rows[:16], **right), expected)
        with encoder.stage([(1, 4, 4)], kind=[3]) as stage:
            stage.rows.copy_(rows[:16])
        assert encoder.stats.wrong_layouts == encoder.stats.as_dict()["wrong_layouts"] == 2 * wrong
        assert len([one for one in caplog.messages if message in one]) == 2 * wrong
        with pytest.raises(vg.errors.LayoutError, match=re.escape(message)):
            encoder.check()
        encoder.check()  # once is enough
    with pytest.raises(vg.errors.LayoutError):  # the host tells at once
        encoder(rows, grid_thw=grid, kind=[1] * len(grid))


@pytest.mark.parametrize(("grid", "count", "message"), WRONG.values(), ids=WRONG.keys())
def test_calls_that_wait_for_their_check_raise_themselves(grid, count, message):
    encoder, rows = grid_encoder(layouts=vg.options.GpuLayouts("checked", simulated=True)), rows_for([count])
    right = {"grid_thw": torch.tensor([(1, 4, 4)]), "kind": torch.tensor([3])}
    expected = encoder(rows[:16], **right)
    for wrong in (1, 2):
        with pytest.raises(vg.errors.LayoutError, match=re.escape(message)):
            encoder(rows, grid_thw=torch.tensor(grid), kind=torch.tensor([1] * len(grid)))
        assert equal_bits(encoder(rows[:16], **right), expected)
        assert encoder.stats.wrong_layouts == wrong
        encoder.check()


def test_there_are_two_ways_to_check_layouts_on_the_gpu():
    with pytest.raises(vg.errors.SpecError, match="layouts='trusted': expected 'reported', 'checked', or a GpuLayouts"):
        grid_encoder(layouts="trusted")


def test_rows_that_an_output_ratio_cuts_are_found_on_the_device():
    class Merging(nn.Module):
        def forward(self, x):
            return x.unflatten(0, (-1, 4)).sum(1)

    encoder = vg.GraphedEncoder(
        Merging(), [128], vg.BufferSpec("x", vg.Lengths(), outputs=vg.outputs.Rows(every=4)), **SIMULATED
    )
    assert encoder(torch.ones(12, 2), lengths=torch.tensor([4, 8])).tolist() == [[4.0, 4.0]] * 3
    assert encoder(torch.ones(12, 2), lengths=torch.tensor([6, 6])).isnan().all()
    with pytest.raises(
        vg.errors.LayoutError, match=re.escape("lengths[0] has 6 rows: expected a multiple of 4, the ratio")
    ):
        encoder.check()


def tells_at_once(encoder, count, items):
    """Whether the host sees the layout of a call (a wrong one, by its rows)."""
    grid = torch.tensor([(1, 2, 2)] * items)
    try:
        encoder(rows_for([count]), grid_thw=grid, kind=torch.zeros(items, dtype=torch.int64))
    except vg.errors.LayoutError:
        return True
    with pytest.raises(vg.errors.LayoutError):
        encoder.check()
    return False


def test_a_layout_stays_on_the_device_only_where_a_budget_holds_whatever_it_says():
    assert not tells_at_once(grid_encoder(), 64, 1)  # 16 frames of one merge block fit
    assert tells_at_once(grid_encoder([vg.budgets.Budget(64, items=4, segments=15)]), 64, 1)
    assert not tells_at_once(grid_encoder([vg.budgets.Budget(64, items=4, segments=15)]), 60, 1)
    assert not tells_at_once(
        grid_encoder(
            [vg.budgets.Budget(64, items=4, segments=15)],
            layouts=vg.options.GpuLayouts(min_segment_rows=8, simulated=True),
        ),
        64,
        1,
    )
    assert tells_at_once(grid_encoder([vg.budgets.Budget(64, items=4, segments=16, max_seqlen=32)]), 64, 1)
    assert tells_at_once(
        grid_encoder([vg.budgets.Budget(64, items=16, segments=16, max_seqlen=32)]), 64, 9
    )  # all rows of one
    assert tells_at_once(grid_encoder(), 64, 5)  # more items than a budget has
    assert tells_at_once(grid_encoder(), 68, 1)


def test_legal_layouts_on_the_device_are_right_where_no_budget_surely_holds_them():
    encoder = grid_encoder([vg.budgets.Budget(64, items=4, segments=4), vg.budgets.Budget(64, items=4, segments=12)])
    for grid in ([(12, 2, 2)], [(16, 2, 2)], [(1, 4, 4), (2, 2, 4)], [(20, 2, 2)]):
        rows = rows_for([t * h * w for t, h, w in grid])
        call = {"grid_thw": torch.tensor(grid), "kind": torch.arange(len(grid))}
        assert distance(encoder(rows, **call)["x"], encoder.eager(rows, **call)["x"]) < 1e-5
    encoder.check()


def test_a_broken_promise_about_segments_is_told():
    encoder = grid_encoder(
        [vg.budgets.Budget(64, items=4, segments=4)], layouts=vg.options.GpuLayouts(min_segment_rows=16, simulated=True)
    )
    kind = torch.tensor([0])
    assert encoder(rows_for([64]), grid_thw=torch.tensor([(4, 4, 4)]), kind=kind)["x"].isfinite().all()
    assert encoder(rows_for([32]), grid_thw=torch.tensor([(8, 2, 2)]), kind=kind)["x"].isnan().all()
    with pytest.raises(
        vg.errors.LayoutError, match=r"describes 8 segments, more than the 4 of the budget chosen .* lower that"
    ):
        encoder.check()
    assert encoder(rows_for([32]), grid_thw=[(8, 2, 2)], kind=[0])["x"].isfinite().all()  # no promise on the host
    with pytest.raises(vg.errors.SpecError, match="min_segment_rows=0: expected an integer of at least 1"):
        grid_encoder(layouts=vg.options.GpuLayouts(min_segment_rows=0))


@pytest.mark.parametrize("columns", [True, False])
def test_a_layout_on_the_device_may_lie_in_memory_in_any_way(columns):
    """A graph reads it there if it lies as an item table does; otherwise it is copied."""

    class Numbered(nn.Module):
        def forward(self, x, position_ids):
            return x * position_ids[:, None]

    columned = (vg.layouts.Column("kind"),) if columns else ()
    spec = vg.BufferSpec("x", vg.GridTHW(columns=columned), [vg.buffers.RowPositions()])
    encoder = vg.GraphedEncoder(Numbered(), [64], spec, **SIMULATED)
    grid = torch.tensor([(1, 2, 2), (2, 3, 1), (1, 1, 5)])
    kind = {"kind": torch.zeros(3, dtype=torch.int64)} if columns else {}
    with torch.inference_mode():
        of_inference = grid.clone()
    as_in_a_table = [grid, torch.cat([grid, grid])[3:], nn.Parameter(grid, requires_grad=False), of_inference]
    otherwise = [
        grid.int(), grid.to(torch.uint8), grid.t().contiguous().t(), torch.stack([grid, grid * 7], 2)[..., 0],
        torch._neg_view(-grid),
    ]  # fmt: skip
    for form in (*as_in_a_table, *otherwise):
        output = encoder(torch.ones(15, 1), grid_thw=form, **kind)
        encoder.check()
        address = int(encoder.executor.store.arena.header[4])
        assert address == (0 if any(form is other for other in otherwise) else form.data_ptr())
        assert output.flatten().tolist() == [*range(4), *range(6), *range(5)]
    assert encoder.stats.eager.total() == 0
    for subclass in (grid.as_subclass(type("Grid", (torch.Tensor,), {})), AsyncCollectiveTensor(grid)):
        assert encoder(torch.ones(15, 1), grid_thw=subclass, **kind).flatten().tolist() == [
            *range(4),
            *range(6),
            *range(5),
        ]
    assert encoder.stats.eager == {"a tensor of a subclass of torch.Tensor": 2}
    call = {"grid_thw": grid, **kind}
    for name, tensor in call.items():
        freed = tensor.clone()
        freed.untyped_storage().resize_(0)
        with pytest.raises(vg.errors.InputError, match=f"the memory of {name} was freed"):
            encoder(torch.ones(15, 1), **(call | {name: freed}))
    assert encoder(torch.ones(15, 1), grid_thw=[*map(tuple, grid.tolist())], **kind).sum() == 6 + 15 + 10
    assert encoder.stats.eager.total() == 2


def test_columns_on_the_host_keep_a_layout_there():
    encoder = grid_encoder()
    with pytest.raises(vg.errors.LayoutError, match="describes 1 item of 4 rows in all, but x has 8 rows"):
        encoder(rows_for([8]), grid_thw=torch.tensor([(1, 2, 2)]), kind=[0])


def test_host_buffers_keep_a_layout_on_the_host():
    class Shared(nn.Module):
        def forward(self, x, count):
            return x * count[0]

    count = vg.buffers.HostBuffer("count", lambda layout: torch.tensor([len(layout)]), (1,), torch.int64)
    spec = vg.BufferSpec("x", vg.Lengths(), buffers=[count])
    encoder = vg.GraphedEncoder(Shared(), [128], spec, **SIMULATED)
    assert encoder(torch.ones(5, 1), lengths=torch.tensor([2, 3])).tolist() == [[2.0]] * 5
    with pytest.raises(vg.errors.LayoutError):
        encoder(torch.ones(5, 1), lengths=torch.tensor([2, 2]))


def test_what_was_wrong_outlives_a_release():
    encoder = attention_encoder()
    encoder(rows_for([6]), lengths=torch.tensor([5]))
    encoder.release()
    assert encoder(rows_for([6]), lengths=[6]).isfinite().all()
    with pytest.raises(vg.errors.LayoutError, match="lengths describes 5 rows in all, but 6 came"):
        encoder.check()


def test_calls_work_under_inference_mode_and_after_it():
    rows, lengths = rows_for([6]), torch.tensor([6])
    for layout in ([6], lengths):
        encoder = attention_encoder()
        with torch.inference_mode():
            inside = encoder(rows, lengths=layout)
        assert torch.equal(encoder(rows, lengths=layout), inside)
    assert encoder(rows, lengths=lengths - 1).isnan().all()
    with pytest.raises(vg.errors.LayoutError):
        encoder.check()


def test_the_default_device_for_new_tensors_changes_nothing():
    bias = vg.buffers.HostBuffer(
        "bias", lambda layout: torch.ones(layout.total, device="cpu"), ("rows",), torch.float32
    )

    def forward(module, x, cu_seqlens, max_seqlen, bias):
        return module(x, cu_seqlens, max_seqlen) + bias[:, None]

    with_host = attention_spec(rows=SHAPED.rows, buffers=[*SHAPED.buffers, bias])
    rows, lengths = rows_for([6]), torch.tensor([6])
    for options in ({"spec": SHAPED}, {"spec": with_host, "forward": forward}):
        encoder = attention_encoder(**options)
        with torch.device("meta"):
            outputs = [encoder(rows, lengths=[6]), encoder(rows, lengths=lengths), encoder.eager(rows, lengths=[6])]
            with encoder.stage([6]) as stage:
                stage.rows.copy_(rows)
            encoder.check()
        for output in (*outputs, stage.output):
            torch.testing.assert_close(output, encoder(rows, lengths=[6]))


def test_calls_of_every_kind_from_several_threads_take_turns():
    encoder = attention_encoder(spec=SHAPED).capture()
    wrong = []

    def work(seed):
        for i in range(15):
            lengths = [1 + (seed * 7 + i * 3) % 60, 1 + i]
            rows = rows_for(lengths, seed)
            expected = encoder.eager(rows, lengths=lengths)
            if seed < 3:
                got = encoder(rows, lengths=torch.tensor(lengths) if seed == 2 else lengths)
            else:
                with encoder.stage(lengths) as stage:
                    stage.rows.copy_(rows)
                got = stage.output
            if distance(got, expected) > 1e-5:
                wrong.append(lengths)

    run_in_threads(work)
    encoder.check()
    assert not wrong
