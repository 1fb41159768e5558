"""`GraphedEncoder`: every call is answered as the module answers it, and what is captured, replayed and counted."""

import contextlib
import copy
import gc
import io
import itertools
import math
import pickle
import re
import sys
import threading
import time
import weakref
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.encoders import (
    UNVERIFIED,
    Attention,
    attention_encoder,
    attention_spec,
    encoder_of,
    load_example,
    original_attention,
    rows_for,
)
from tests.support.threads import run_in_threads
from tests.support.towers import distance, equal_bits
from varlen_graphs.attention import timing
from varlen_graphs.attention.inputs import AttentionInputs

ATTENTION = Attention()
original = original_attention(ATTENTION)


def shaped_encoder():
    return attention_encoder(spec=attention_spec(rows=vg.inputs.Rows("x", shape=(8,))))


def test_the_padding_contract_holds_for_a_module_of_ones_own():
    layouts = [[64, 64], [1], [3, 60], [64], [1, 1, 1, 1, 1, 1, 1, 1], [128], [20, 30]]
    encoder = shaped_encoder()
    check_padding_contract(encoder, original, rows_for, "lengths", layouts, 1e-5)


@pytest.fixture(scope="module")
def used():
    """An encoder for all examples of a property."""
    return attention_encoder()


@settings(max_examples=30)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(0, 3))
def test_any_call_equals_eager_however_it_is_split(used, lengths, seed):
    rows, before = rows_for(lengths, seed), used.stats.replays.total() + used.stats.eager.total()
    assert distance(used(rows, lengths=lengths), original(rows, lengths)) < 1e-5
    assert used.stats.replays.total() + used.stats.eager.total() > before


def test_items_keep_their_order_when_a_call_is_split():
    lengths = [100, 20, 90, 30, 5, 128, 64]
    encoder, rows = attention_encoder(), rows_for(lengths)
    assert distance(encoder(rows, lengths=lengths), original(rows, lengths)) < 1e-5
    assert encoder.stats.replays.total() > 1
    assert not encoder.stats.eager


def test_an_item_larger_than_every_budget_runs_eager_beside_the_others():
    lengths = [20, 300, 30]
    encoder, rows = attention_encoder(), rows_for(lengths)
    assert distance(encoder(rows, lengths=lengths), original(rows, lengths)) < 1e-5
    assert encoder.stats.eager == {"larger than every budget": 1}
    assert encoder.stats.replays.total() == 1
    assert distance(encoder(rows_for([300]), lengths=[300]), original(rows_for([300]), [300])) < 1e-5


def test_what_runs_eager_neither_writes_to_the_rows_nor_hands_them_back():
    class InPlace(nn.Module):
        def forward(self, x):
            x += 1
            return x

    spec = vg.BufferSpec("x", vg.Lengths())
    encoder = vg.GraphedEncoder(InPlace(), [64, 128], spec, backend="tape")
    for lengths in ([150, 50], [150], [50]):
        rows = torch.zeros(sum(lengths), 1, requires_grad=True)
        out = encoder(rows, lengths=lengths)
        assert out.eq(1).all()
        assert not out.requires_grad
        out.fill_(7)
        assert rows.eq(0).all()


def test_rows_are_cast_for_the_module_itself_too():
    class Linear(nn.Linear):
        def forward(self, x, lengths):
            return super().forward(x)

    module = Linear(8, 8, dtype=torch.float64)
    encoder = vg.GraphedEncoder(
        module, [64], vg.BufferSpec("x", vg.Lengths()), forward=lambda module, x: x @ module.weight.T + module.bias,
        backend="tape",
    )  # fmt: skip
    rows, seen = rows_for([6]), []
    expected = encoder(rows, lengths=[6])
    module.register_forward_hook(lambda *args: seen.append(1))
    torch.testing.assert_close(encoder(rows, lengths=[6]), expected)
    assert seen


@pytest.mark.parametrize("lengths", [[300], [20, 300]])
def test_an_item_larger_than_every_budget_is_an_error_if_asked_for(lengths):
    encoder = attention_encoder(on_miss="error")
    with pytest.raises(
        vg.errors.BudgetError, match=r"item \d is \(1, 1, 300\) and needs .*largest budget .*add a larger"
    ):
        encoder(rows_for(lengths), lengths=lengths)
    assert distance(encoder(rows_for([20]), lengths=[20]), original(rows_for([20]), [20])) < 1e-5


def test_a_segment_longer_than_max_seqlen_does_not_go_into_a_budget():
    encoder = attention_encoder([vg.budgets.Budget(64, items=4, max_seqlen=16), vg.budgets.Budget(128, items=4)])
    encoder(rows_for([20]), lengths=[20])
    assert [budget.rows for budget in encoder.stats.replays] == [128]


def test_outputs_are_the_callers_own():
    encoder = attention_encoder()
    first = encoder(rows_for([5]), lengths=[5])
    kept = first.clone()
    second = encoder(rows_for([9], seed=1), lengths=[9])
    assert torch.equal(first, kept)
    first.zero_()
    again = encoder(rows_for([9], seed=1), lengths=[9])
    assert torch.equal(second, again)
    assert not again.requires_grad


def test_all_ways_to_describe_items_are_the_same():
    encoder, rows = attention_encoder(), rows_for([3, 4])
    expected = encoder(rows, lengths=[3, 4])
    for lengths in ((3, 4), torch.tensor([3, 4]), torch.tensor([3, 4], dtype=torch.int32)):
        assert torch.equal(encoder(rows, lengths=lengths), expected)
    assert torch.equal(encoder(rows, lengths=[3, 4], scale=1.0), expected)
    assert torch.equal(encoder(x=rows, lengths=[3, 4]), expected)


def test_static_arguments_are_part_of_the_key_of_a_graph():
    encoder, rows = attention_encoder(), rows_for([6])
    once, twice = encoder(rows, lengths=[6]), encoder(rows, lengths=[6], scale=2.0)
    torch.testing.assert_close(twice - rows, 2 * (once - rows))
    assert repr(encoder).endswith("4 captured)")
    encoder(rows, lengths=[6], scale=1.0)  # the default, so the same graphs as without
    assert repr(encoder).endswith("4 captured)")


def test_floating_rows_are_cast_as_towers_cast_for_themselves():
    encoder, rows = attention_encoder(), rows_for([6])
    expected = encoder(rows.double().float(), lengths=[6])
    assert torch.equal(encoder(rows.double(), lengths=[6]), expected)
    assert encoder.eager(rows.double(), lengths=[6]).dtype == torch.float32


def test_rows_that_are_not_contiguous_are_copied_like_any_others():
    encoder, rows = attention_encoder(), rows_for([6])
    strided = torch.cat([rows, rows], dim=1)[:, :8]
    assert not strided.is_contiguous()
    assert torch.equal(encoder(strided, lengths=[6]), encoder(rows, lengths=[6]))
    assert torch.equal(encoder.eager(strided, lengths=[6]), encoder.eager(rows, lengths=[6]))


def test_weights_may_change_in_place():
    encoder, rows = attention_encoder(), rows_for([6])
    before = encoder(rows, lengths=[6])
    with torch.no_grad():
        encoder.module.qkv.weight.mul_(-1)
    after = encoder(rows, lengths=[6])
    assert distance(before, after) > 0.1
    assert distance(after, encoder.eager(rows, lengths=[6])) < 1e-6
    encoder.module.load_state_dict(Attention().state_dict())
    assert torch.equal(encoder(rows, lengths=[6]), before)


def test_memory_that_a_budget_of_its_own_reads_is_held():
    class Cached(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            if self.factor is None or len(self.factor) != len(x):
                self.factor = torch.full((len(x), 1), 3.0, device=x.device)
                made.append(weakref.ref(self.factor.untyped_storage()))
            return super().forward(x, cu_seqlens, max_seqlen) * self.factor

    module, made = Cached(), []
    module.factor = None
    encoder, rows = attention_encoder(module=module, verify=UNVERIFIED), rows_for([6])
    encoder(rows, lengths=[6])
    gc.collect()
    assert sum(reference() is not None for reference in made) >= 2  # those of trial runs are gone


def test_an_encoder_is_freed_at_once_when_it_is_dropped():
    encoder = attention_encoder()
    encoder(rows_for([6]), lengths=[6])
    watched = weakref.ref(encoder), weakref.ref(encoder.executor.store.arena)
    gc.disable()
    try:
        del encoder
        assert [reference() for reference in watched] == [None, None]
    finally:
        gc.enable()


def test_capture_takes_the_static_arguments_of_calls():
    encoder = shaped_encoder()
    encoder.capture(scale=1.0).capture()  # the default
    assert repr(encoder).endswith("2 captured)")
    encoder.capture(scale=2.0)
    assert repr(encoder).endswith("4 captured)")
    with pytest.raises(vg.errors.InputError, match="Attention has no argument 'scales'"):
        encoder.capture(scales=2.0)


def test_capture_in_another_state_is_refused_and_graphs_keep_that_of_construction():
    encoder = shaped_encoder()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(vg.errors.CaptureError, match=r"calls run eager now \(autocast differs from construction\)"),
    ):
        encoder.capture()
    encoder.module.train()
    with pytest.raises(vg.errors.CaptureError, match="training mode differs from construction"):
        encoder.capture()


def test_none_is_a_value_where_the_default_is_another():
    class Norm(Attention):
        def forward(self, x, cu_seqlens, max_seqlen, norm="l2"):
            out = super().forward(x, cu_seqlens, max_seqlen)
            return out if norm is None else out * 0

    encoder, rows = attention_encoder(module=Norm()), rows_for([6])
    assert encoder(rows, lengths=[6], norm=None).any()
    assert encoder.eager(rows, lengths=[6], norm=None).any()
    assert not encoder(rows, lengths=[6]).any()


def test_capturing_does_nothing_while_the_library_is_disabled(monkeypatch):
    encoder = shaped_encoder()
    monkeypatch.setenv("VARLEN_GRAPHS_DISABLE", "1")
    encoder.capture()
    assert not len(encoder.executor.store)
    monkeypatch.delenv("VARLEN_GRAPHS_DISABLE")
    encoder.capture()
    assert len(encoder.executor.store)


@pytest.mark.parametrize("setting", ["1", "true", "True", " YES ", "on"])
def test_the_environment_disables_the_library_however_it_says_so(monkeypatch, setting):
    encoder = attention_encoder()
    monkeypatch.setenv("VARLEN_GRAPHS_DISABLE", setting)
    encoder(rows_for([6]), lengths=[6])
    assert encoder.stats.eager == {"VARLEN_GRAPHS_DISABLE=1": 1}


@pytest.mark.parametrize("setting", ["0", "False", " no", "OFF", "", " "])
def test_the_environment_leaves_the_library_on(monkeypatch, recwarn, setting):
    encoder = attention_encoder()
    monkeypatch.setenv("VARLEN_GRAPHS_DISABLE", setting)
    encoder(rows_for([6]), lengths=[6])
    assert not encoder.stats.eager
    assert not [one for one in recwarn if "VARLEN_GRAPHS_DISABLE" in str(one.message)]


def test_a_setting_of_the_environment_that_says_neither_warns(monkeypatch):
    encoder = attention_encoder()
    monkeypatch.setenv("VARLEN_GRAPHS_DISABLE", "graphs off please")
    with pytest.warns(UserWarning, match="VARLEN_GRAPHS_DISABLE='graphs off please': expected one of 1, true, yes, on"):
        encoder(rows_for([6]), lengths=[6])
    assert not encoder.stats.eager


def test_a_call_of_items_that_are_all_too_large_captures_nothing():
    encoder, lengths = attention_encoder(), [300, 400]
    assert distance(encoder(rows_for(lengths), lengths=lengths), original(rows_for(lengths), lengths)) < 1e-5
    assert repr(encoder).endswith("0 captured)")
    assert encoder.stats.eager == {"larger than every budget": 1}


def test_a_module_may_get_its_weights_after_it_was_wrapped():
    with torch.device("meta"):
        module = Attention()
    encoder = attention_encoder(module=module)
    module.load_state_dict(ATTENTION.state_dict(), assign=True)
    assert distance(encoder(rows_for([6]), lengths=[6]), original(rows_for([6]), [6])) < 1e-5


def test_disabling_wins_over_a_backend_that_is_not_there(monkeypatch):
    monkeypatch.setenv("VARLEN_GRAPHS_DISABLE", "1")
    encoder = attention_encoder(backend="cuda")
    assert distance(encoder(rows_for([6]), lengths=[6]), original(rows_for([6]), [6])) < 1e-5


def test_a_function_around_a_module_that_takes_no_items_runs_eager_under_hooks():
    encoder = attention_encoder(
        module=nn.Linear(8, 8), spec=vg.BufferSpec("x", vg.Lengths()), forward=lambda m, x: m(x)
    )
    seen = []
    encoder.module.register_forward_hook(lambda *args: seen.append(1))
    encoder(rows_for([6]), lengths=[6])
    assert seen
    assert encoder.stats.eager == {"forward hooks": 1}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def slow_terminal(monkeypatch):
    """Make standard error a terminal; three seconds go by whenever somebody asks."""
    monkeypatch.setattr("time.monotonic", itertools.count(step=3).__next__)
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_a_capture_that_takes_long_shows_how_far_it_is(monkeypatch):
    terminal, encoder = slow_terminal(monkeypatch), shaped_encoder().capture()
    shown = terminal.getvalue()
    assert re.search(rf"capturing: \d/{len(encoder.budgets)} graphs", shown)
    assert re.search(rf"verifying: \d/{len(encoder.budgets)} graphs", shown)
    assert not shown.rpartition("\r")[2].strip()  # and leaves nothing behind
    monkeypatch.setenv("TQDM_DISABLE", "1")
    shaped_encoder().capture()
    monkeypatch.delenv("TQDM_DISABLE")
    monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    shaped_encoder().capture()
    assert terminal.getvalue() == shown


def test_the_log_has_one_line_for_a_new_set_of_graphs(caplog):
    caplog.set_level("INFO", "varlen_graphs")
    encoder = shaped_encoder()
    encoder.capture().capture()
    (line,) = (record.getMessage() for record in caplog.records if record.name == "varlen_graphs")
    rows = [budget.rows for budget in encoder.budgets]
    made = rf"Attention has {len(rows)} graphs? of {min(rows)} to {max(rows)} rows"
    assert re.fullmatch(rf"{made}; captured in \d\.\d s; verified in \d\.\d s", line)


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_terminal_that_fails_or_an_interrupt_there_holds_up_no_capture(monkeypatch, error):
    def write(self, text):
        raise error

    with monkeypatch.context() as patch:
        slow_terminal(patch)
        patch.setattr(Terminal, "write", write)
        with pytest.raises(error) if error is KeyboardInterrupt else contextlib.nullcontext():
            shaped_encoder().capture()
    run_in_threads(lambda _: shaped_encoder().capture(), 2)


def test_a_capture_takes_no_lock_that_others_may_hold_and_starts_no_thread():
    """The lock of tqdm, which all bars of a process share, and its monitor."""
    bars, threads = pytest.importorskip("tqdm").tqdm, set(threading.enumerate())
    held, captured = threading.Event(), threading.Event()

    def hold():
        with bars.get_lock():
            held.set()
            captured.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    shaped_encoder().capture()
    assert holder.is_alive()  # nobody waited for it
    captured.set()
    holder.join()
    assert set(threading.enumerate()) <= threads


def test_capture_before_the_first_call_needs_the_shape_of_a_row():
    with pytest.raises(vg.errors.SpecError, match=r"declare rows=vg.inputs.Rows\('x', shape=...\)"):
        attention_encoder().capture()
    encoder = shaped_encoder().capture()
    assert repr(encoder) == "GraphedEncoder(Attention, 2 budgets of 64..128 rows, 2 captured)"
    encoder.release()
    assert repr(encoder).endswith("0 captured)")


def test_stats_count_calls_items_replays_and_padding():
    encoder = attention_encoder()
    encoder(rows_for([10, 20]), lengths=[10, 20])
    encoder(rows_for([100]), lengths=[100])
    stats = encoder.stats
    assert (stats.calls, stats.items, stats.rows, stats.padding) == (2, 3, 130, 34 + 28)
    assert {budget.rows: count for budget, count in stats.replays.items()} == {64: 1, 128: 1}
    assert stats.padding_share == pytest.approx(62 / 192)


def test_calls_in_another_state_run_eager_with_a_named_reason(monkeypatch):
    encoder, rows = attention_encoder(), rows_for([6])
    expected = encoder(rows, lengths=[6])
    encoder = attention_encoder(module=Attention().eval())
    encoder.module.train()
    encoder(rows, lengths=[6])
    encoder.module.eval()
    with torch.autocast("cpu", torch.bfloat16):
        encoder(rows, lengths=[6])
    monkeypatch.setenv("VARLEN_GRAPHS_DISABLE", "1")
    encoder(rows, lengths=[6])
    monkeypatch.delenv("VARLEN_GRAPHS_DISABLE")
    seen = []
    hook = encoder.module.qkv.register_forward_hook(lambda *args: seen.append(1))
    encoder(rows, lengths=[6])
    hook.remove()
    assert seen
    assert encoder.stats.eager == {
        "training mode differs from construction": 1,
        "autocast differs from construction": 1,
        "VARLEN_GRAPHS_DISABLE=1": 1,
        "forward hooks": 1,
    }
    assert not encoder.stats.replays
    assert torch.equal(encoder(rows, lengths=[6]), expected)


def test_a_module_without_parameters_is_captured_too():
    class Doubled(nn.Module):
        def forward(self, x):
            return x * 2

    encoder = vg.GraphedEncoder(Doubled(), [128], vg.BufferSpec("x", vg.Lengths()), backend="tape")
    assert encoder(torch.ones(5, 2), lengths=[2, 3]).tolist() == [[2.0, 2.0]] * 5
    assert encoder.stats.replays.total() == 1


def test_static_arguments_of_different_types_have_graphs_of_their_own():
    class Picky(nn.Module):
        def forward(self, x, how):
            return x + (10 if how is True else how)

    encoder = vg.GraphedEncoder(Picky(), [128], vg.BufferSpec("x", vg.Lengths()), backend="tape")
    rows = torch.zeros(1, 1)
    assert [encoder(rows, lengths=[1], how=how).item() for how in (1, True, 1.0)] == [1, 10, 1]
    assert repr(encoder).endswith("3 captured)")


@dataclass(frozen=True)
class Setting:
    scale: float
    shifts: frozenset = frozenset()


@pytest.mark.parametrize(
    "pair",
    [
        (Setting(1), Setting(1.0)),
        (Setting(2, frozenset({1})), Setting(2, frozenset({1.0}))),
        (Setting(0.0), Setting(-0.0)),
        ((1, (0,)), (1, (False,))),
        (0.0, -0.0),
    ],
)
def test_equal_static_arguments_with_other_types_inside_have_graphs_of_their_own(pair):
    class Scales(nn.Module):
        def forward(self, x, by):
            scale = by.scale + sum(by.shifts) if isinstance(by, Setting) else by[1][0] if isinstance(by, tuple) else by
            return (1 / (x * scale) if scale == 0 and scale is not False else x * scale).expand(len(x), 1)

    rows = vg.inputs.Rows("x", shape=(1,), dtype=torch.int64)
    encoder = vg.GraphedEncoder(Scales(), [128], vg.BufferSpec(rows, vg.Lengths()), backend="tape")
    ones = torch.ones(3, 1, dtype=torch.int64)
    for by in pair:
        got, expected = encoder(ones, lengths=[3], by=by), Scales()(ones, by)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    assert repr(encoder).endswith("2 captured)")


def test_static_arguments_that_change_from_call_to_call_are_warned_of():
    encoder, rows = attention_encoder([64]), rows_for([6])
    for scale in range(2, 9):
        encoder(rows, lengths=[6], scale=scale)
    with pytest.warns(UserWarning, match=r"8 sets of static arguments were captured, the last with \{'scale': 9"):
        encoder(rows, lengths=[6], scale=9)


def test_an_encoder_made_under_autocast_is_captured_under_autocast():
    rows = rows_for([6])
    with torch.autocast("cpu", torch.bfloat16):
        encoder = attention_encoder()
        inside = encoder(rows, lengths=[6])
        assert distance(inside, encoder.eager(rows, lengths=[6])) == 0
    assert not encoder.stats.eager
    assert distance(inside, original(rows, [6])) > 1e-4


def test_on_the_cpu_calls_run_eager_with_one_warning():
    encoder, rows = attention_encoder(backend="auto"), rows_for([6])
    with pytest.warns(UserWarning, match="Attention is on cpu, where there are no CUDA graphs: calls run eager. Pass"):
        out = encoder(rows, lengths=[6])
    assert distance(out, original(rows, [6])) < 1e-5
    encoder(rows, lengths=[6])
    assert encoder.stats.eager == {"no CUDA graphs here": 2}
    encoder = attention_encoder(backend="eager")
    encoder(rows, lengths=[6])
    assert encoder.stats.eager == {"no CUDA graphs here": 1}


class Slow(nn.Linear):
    """Takes so long that captures in several threads would overlap."""

    def forward(self, x):
        time.sleep(0.005 * (1 + threading.get_ident() % 3))
        return super().forward(x)


def test_captures_in_pools_of_their_own_take_turns_too():
    """What is set for a capture holds for the process: captures that overlapped would leave torch's compiler off."""
    encoders = [
        vg.GraphedEncoder(
            Slow(8, 8), [128, 256], vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths()), backend="tape"
        )
        for _ in range(3)
    ]
    q, bounds = torch.zeros(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    inputs = AttentionInputs(q, q, q, bounds, bounds, None, 0, None, 0, 4, 4, 1.0, -1, -1)

    def capture(number):
        encoders[number].capture()
        assert timing.fastest(inputs, {"first": refuse, "second": refuse}) == "first"  # times nothing any more

    def refuse(inputs):
        raise AssertionError("was timed")

    run_in_threads(capture, count=3)
    graphs = []
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: graphs.append(graph) or graph)
    compiled(torch.ones(3))
    assert graphs


def test_encoders_may_share_a_pool_and_its_lock():
    pool = vg.options.Pool()
    one, two = attention_encoder(pool=pool), attention_encoder(pool=pool)
    assert one.pool is two.pool is pool
    rows = rows_for([6])
    assert torch.equal(one(rows, lengths=[6]), two(rows, lengths=[6]))
    done = []
    with pool.exclusive():
        thread = threading.Thread(target=lambda: done.append(two(rows, lengths=[6])))
        thread.start()
        thread.join(timeout=0.3)
        assert not done
    thread.join()
    assert done


def test_the_example_with_token_ids_and_pooled_items_keeps_the_contract():
    example = load_example("text_encoder")
    torch.manual_seed(0)
    module = example.TextEncoder(depth=2).eval()
    encoder = example.graph(module, backend="tape")

    def ids(lengths, seed):
        return torch.randint(1000, (sum(lengths),), generator=torch.Generator().manual_seed(seed))

    def eager(rows, lengths):
        cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths])
        with torch.no_grad():
            return module(rows, positions, cu_seqlens, max(lengths), cu_seqlens[:-1].long())

    encoder(ids([5], 0), lengths=[5])
    layouts = [[512, 512, 512, 512], [1], [100, 3, 400], [512], [16] * 32, [7, 9]]
    check_padding_contract(encoder, eager, ids, "lengths", layouts, 1e-5)
    encoder(ids([500] * 3, 0), lengths=[500] * 3)
    many = [30] * 200
    assert distance(encoder(ids(many, 1), lengths=many), eager(ids(many, 1), many)) < 1e-5


class Everything(nn.Module):
    """Takes each kind of argument there is, and gives each kind of output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, grid_thw, kind, row_kind, spread, host):
        per_item = (grid_thw.prod(-1) * (kind + 1)).float()
        return {"rows": x * row_kind[:, None] * self.weight + spread[:, None], "items": (per_item, host.float())}


def everything(backend):
    kinds = vg.GridTHW(columns=(vg.layouts.Column("kind", pad=-1),))
    return vg.GraphedEncoder(
        Everything(),
        [vg.budgets.Budget(64, items=4, segments=16)],
        vg.BufferSpec(
            rows="x",
            layout=kinds,
            buffers=[
                vg.buffers.DeviceBuffer("row_kind", lambda table: table.column("kind")[table.row_item]),
                vg.buffers.DeviceBuffer(
                    "spread", lambda table: table.row_in_item / table.item_rows[table.row_item].clamp(1)
                ),
                vg.buffers.HostBuffer(
                    "host",
                    lambda layout: torch.tensor([len(layout), *layout.rows])[1:],
                    ("items",),
                    torch.int64,
                    pad=-7,
                ),
            ],
            outputs=vg.outputs.Fields(rows=vg.outputs.Rows(), items=vg.outputs.Items()),
        ),
        backend=backend,
    )


@pytest.fixture(scope="module")
def both():
    return everything("tape"), everything("eager")


@settings(max_examples=30)
@given(st.data())
def test_columns_and_buffers_of_ones_own_reach_the_module(both, data):
    items = data.draw(st.lists(st.tuples(*[st.integers(1, 3)] * 3), min_size=1, max_size=6))
    kinds = data.draw(st.lists(st.integers(0, 9), min_size=len(items), max_size=len(items)))
    rows = rows_for([t * h * w for t, h, w in items])
    graphed, eager = both
    call = {"grid_thw": items, "kind": torch.tensor(kinds)}
    got, expected = graphed(rows, **call), eager(rows, **call)
    assert equal_bits(got, expected)
    sizes = [t * h * w for t, h, w in items]
    assert got["items"][1].tolist() == sizes
    assert got["items"][0].tolist() == [size * (kind + 1) for size, kind in zip(sizes, kinds, strict=True)]


@pytest.mark.parametrize("grid", [[(8, 1, 2)], [(3, 1, 2), (1, 1, 6)], [(2, 2, 2)] * 3])
def test_segments_of_a_buffer_of_ones_own_count_against_budgets(grid):
    spec = vg.BufferSpec(
        rows="x",
        layout=vg.GridTHW(),
        buffers=[
            vg.buffers.DeviceBuffer("cu_seqlens", lambda table: table.cu_seqlens("frame")),
            vg.buffers.DeviceBuffer("max_seqlen", lambda table: table.budget.max_seqlen),
        ],
    )
    budgets = [vg.budgets.Budget(32, items=4, segments=4), vg.budgets.Budget(32, items=4, segments=8)]
    encoder, rows = attention_encoder(budgets, spec=spec), rows_for([t * h * w for t, h, w in grid])
    expected = original(rows, [h * w for t, h, w in grid for _ in range(t)])
    assert distance(encoder(rows, grid_thw=grid), expected) < 1e-5
    assert distance(encoder.eager(rows, grid_thw=grid), expected) < 1e-5


def test_arguments_of_the_module_alone_are_never_dropped():
    class Gained(Attention):
        def forward(self, x, cu_seqlens, max_seqlen, gain=1.0):
            return super().forward(x, cu_seqlens, max_seqlen) * gain

    def forward(module, x, cu_seqlens, max_seqlen):
        return module(x, cu_seqlens, max_seqlen)

    encoder = attention_encoder(module=Gained(), forward=forward)  # the module itself takes no lengths
    with pytest.raises(vg.errors.InputError, match="Gained has no argument 'gain'"):
        encoder(rows_for([6]), lengths=[6], gain=3.0)
    with pytest.raises(vg.errors.InputError, match="Attention has no argument 'output_hidden_states'"):
        attention_encoder()(rows_for([6]), lengths=[6], output_hidden_states=True)
    with pytest.raises(vg.errors.InputError, match="argument 'cu_seqlens' is not a static argument"):
        shaped_encoder().capture(cu_seqlens=3)


def test_a_compiled_module_stays_compiled():
    compiled, rows = [], rows_for([6])

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    module = torch.compile(Attention(), backend=backend)
    encoder = attention_encoder(module=module)
    assert distance(encoder(rows, lengths=[6]), original(rows, [6])) < 1e-5
    before = len(compiled)
    with torch.no_grad():
        module(rows_for([7]), torch.tensor([0, 7], dtype=torch.int32), 7)
    assert len(compiled) > before


def test_an_encoder_may_take_the_place_of_the_modules_forward():
    """The module object, its class, dtype and hooks stay; `del module.forward` undoes it."""

    class Twice(Attention):
        def forward(self, x, cu_seqlens=None, max_seqlen=0, lengths=None):
            return super().forward(x, cu_seqlens, max_seqlen) * 2

    module, rows = Twice(), rows_for([6])
    encoder = attention_encoder(module=module)
    module.forward = encoder.forward
    assert distance(module(rows, lengths=[6]), 2 * original(rows, [6])) < 1e-5
    assert distance(module(rows_for([300]), lengths=[300]), 2 * original(rows_for([300]), [300])) < 1e-5
    assert encoder.stats.replays.total() == 1
    hook = module.qkv.register_forward_hook(lambda *args: None)
    assert distance(module(rows, lengths=[6]), 2 * original(rows, [6])) < 1e-5
    hook.remove()
    del module.forward
    assert encoder.stats.calls == 3


def test_a_capture_with_dropout_at_work_is_warned_of():
    class Dropping(Attention):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x, cu_seqlens, max_seqlen):
            return self.dropout(super().forward(x, cu_seqlens, max_seqlen))

    with pytest.warns(UserWarning, match="captured in training mode with 1 active dropout; call module.eval"):
        attention_encoder(module=Dropping(), verify=UNVERIFIED)(rows_for([6]), lengths=[6])
    attention_encoder(module=Dropping().eval())(rows_for([6]), lengths=[6])


def test_tables_of_positions_need_no_more_entries_than_calls_use():
    """Graphs are captured and timed with squares of moderate size."""

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.height, self.width = nn.Embedding(64, 8), nn.Embedding(64, 8)

        def forward(self, x, at):
            return x + self.height(at[:, 0]) + self.width(at[:, 1])

    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(77, 8)

        def forward(self, x, at):
            return x + self.table(at)

    grids = vg.BufferSpec("x", vg.GridTHW("items"), [vg.buffers.GridPositions("at")], vg.outputs.Rows())
    texts = vg.BufferSpec("x", vg.Lengths("items"), [vg.buffers.RowPositions("at")], vg.outputs.Rows())
    for module, spec, items in ((Patches(), grids, [(1, 14, 14), (3, 64, 9), (1, 2, 64)]), (Text(), texts, [77, 3])):
        encoder = vg.GraphedEncoder(module, vg.Ladder(256, 4096, step=1.5), spec, backend="tape")
        rows = torch.randn(sum(math.prod(item) if isinstance(item, tuple) else item for item in items), 8)
        torch.testing.assert_close(encoder(rows, items=items), encoder.eager(rows, items=items))
        assert not encoder.stats.eager


@pytest.mark.parametrize(
    "declared", [vg.outputs.Rows(), vg.outputs.Items(rows=64), vg.outputs.Rows(every=64), vg.outputs.Items()]
)
def test_a_declaration_that_fits_by_chance_is_refused(declared):
    """From 512 rows up a plain budget has an item for every 64 rows, so these have the same capacities there."""

    class Pooling(nn.Module):
        def forward(self, x, lengths, every):
            return {"rows": x, "items": x.new_ones(len(lengths) * 64, 1), "64": x[::64], "item": lengths[:, None]}[
                every
            ]

    truths = {
        "rows": vg.outputs.Rows(),
        "items": vg.outputs.Items(rows=64),
        "64": vg.outputs.Rows(every=64),
        "item": vg.outputs.Items(),
    }
    for every, truth in truths.items():
        spec = vg.BufferSpec("x", vg.Lengths(), outputs=declared)
        rows = torch.ones(128, 1)
        for backend in ("tape", "eager"):
            encoder = vg.GraphedEncoder(Pooling(), [512, 1024], spec, backend=backend)
            if truth == declared:
                assert encoder(rows, lengths=[64, 64], every=every) is not None
            elif backend == "tape":
                with pytest.raises(vg.errors.SpecError, match="is declared as"):
                    encoder(rows, lengths=[64, 64], every=every)
            else:
                with pytest.raises(vg.errors.SpecError, match="is declared as"):
                    encoder(rows[:64].repeat(3, 1), lengths=[64, 128], every=every)


def test_submodules_that_are_added_are_noticed():
    class Adapted(Attention):
        def __init__(self):
            super().__init__()
            self.adapters = nn.ModuleDict()

        def forward(self, x, cu_seqlens, max_seqlen):
            x = super().forward(x, cu_seqlens, max_seqlen)
            return x + sum(adapter(x) for adapter in self.adapters.values())

    encoder = attention_encoder(module=Adapted())
    encoder(rows_for([6]), lengths=[6])
    encoder.module.adapters["one"] = nn.Linear(8, 8)
    with pytest.raises(
        vg.errors.StaleGraphError, match="'adapters' gained or lost a parameter, buffer or submodule since"
    ):
        encoder(rows_for([6]), lengths=[6])


@pytest.mark.parametrize(
    ("where", "part"),
    [("", nn.Linear(8, 8)), ("qkv", nn.Linear(8, 8)), ("qkv", nn.Parameter(torch.ones(8))), ("", torch.ones(8))],
    ids=["module", "module in a part", "parameter", "buffer"],
)
def test_a_part_under_a_new_name_is_noticed_at_the_next_call(where, part):
    encoder = attention_encoder()
    encoder(rows_for([6]), lengths=[6])
    owner = encoder.module.get_submodule(where)
    owner.register_buffer("extra", part) if type(part) is torch.Tensor else setattr(owner, "extra", part)
    with pytest.raises(
        vg.errors.StaleGraphError,
        match=f"'{where or 'the module'}' gained or lost a parameter, buffer or submodule since",
    ):
        encoder(rows_for([6]), lengths=[6])
    encoder.release()
    encoder(rows_for([6]), lengths=[6])


def test_ordinary_modules_are_captured():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.script = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
            self.norm = nn.RMSNorm(8)
            self.register_buffer("cache", None)

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.arange(8.0, device=x.device)
            return torch.vmap(torch.nn.functional.silu)(self.norm(self.script(x) * self.cache))

    encoder = attention_encoder(module=Mapped(), spec=vg.BufferSpec("x", vg.Lengths()))
    for seed in range(2):
        rows = rows_for([6], seed)
        assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6
    assert encoder.stats.replays.total() == 2


def test_the_padding_contract_holds_for_host_buffers_columns_and_raster_positions():
    class Positioned(Attention):
        def forward(self, x, cu_seqlens, max_seqlen, position_ids, kinds, shares):
            x = super().forward(x, cu_seqlens, max_seqlen) + position_ids.sum(-1, keepdim=True)
            return x * shares[:, None] + kinds[:, None]

    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("x", shape=(8,)),
        layout=vg.GridTHW("grid_thw", columns=(vg.layouts.Column("kind", pad=-1),)),
        buffers=[
            vg.buffers.CuSeqlens(per="clip"),
            vg.buffers.MaxSeqlen(per="clip"),
            vg.buffers.GridPositions(order="raster", axes=("t", "h", "w")),
            vg.buffers.DeviceBuffer("kinds", lambda table: table.column("kind")[table.row_item]),
            vg.buffers.HostBuffer("shares", shares_of, ("rows",), torch.float32, pad=7),
        ],
    )
    module = Positioned()
    graphed, eager = (attention_encoder(module=module, spec=spec, backend=backend) for backend in ("tape", "eager"))

    class WithKinds:
        """The encoder, with a kind for each item of the layout."""

        executor, stats, capture, poison = graphed.executor, graphed.stats, graphed.capture, graphed.poison

        def __call__(self, rows, grid_thw):
            return graphed(rows, grid_thw=grid_thw, kind=range_of(grid_thw))

    layouts = [[(1, 8, 16)], [(1, 1, 1)], [(2, 3, 4), (1, 5, 7)], [(4, 4, 8)], [(1, 1, 2)] * 8]
    check_padding_contract(
        WithKinds(),
        lambda rows, grid: eager(rows, grid_thw=grid, kind=range_of(grid)),
        lambda grid, seed: rows_for([t * h * w for t, h, w in grid], seed),
        "grid_thw",
        layouts,
        1e-5,
    )


def range_of(items):
    return list(range(len(items)))


def shares_of(layout):
    return torch.tensor([1 / rows for rows in layout.rows for _ in range(rows)])


def test_release_frees_what_was_captured_and_the_next_call_captures_anew():
    encoder, rows = attention_encoder(), rows_for([6])
    first = encoder(rows, lengths=[6])
    encoder.release()
    with torch.no_grad():
        encoder.module.qkv.bias.add_(1)
    encoder.module.to(torch.float64)
    assert encoder(rows, lengths=[6]).dtype == torch.float64
    assert not torch.equal(encoder(rows, lengths=[6]).float(), first)


def test_a_copied_module_has_graphs_of_its_own():
    encoder = attention_encoder()
    encoder(rows_for([6]), lengths=[6])
    other = attention_encoder(module=copy.deepcopy(encoder.module))
    with torch.no_grad():
        other.module.qkv.weight.zero_()
    assert not torch.equal(other(rows_for([6]), lengths=[6]), encoder(rows_for([6]), lengths=[6]))


class Pruning(nn.Linear):
    """Drops rows by their content, if it is told to: how many are left depends on the data."""

    prune = False

    def forward(self, x):
        x = super().forward(x)
        return x[x.sum(-1) > 0] if self.prune else x


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_encoder_is_neither_copied_nor_pickled(how):
    encoder = attention_encoder()
    encoder(rows_for([3]), lengths=[3])
    with pytest.raises(TypeError, match="copy its module, and make an encoder of the copy"):
        how(encoder)


def test_content_pruning_turns_graphs_off_with_a_reason():
    def off(module):
        return "content pruning" if module.prune else None

    module = Pruning(8, 8)
    encoder = vg.GraphedEncoder(module, [64], vg.BufferSpec("x", vg.Lengths()), backend="tape", eager_if=off)
    rows = rows_for([6, 20])
    with torch.no_grad():
        assert torch.equal(encoder(rows, lengths=[6, 20]), module(rows))
        module.prune = True
        assert torch.equal(encoder(rows, lengths=[6, 20]), module(rows))
        with encoder.stage([6, 20]) as stage:
            stage.rows.copy_(rows)
        assert torch.equal(stage.output, module(rows))
        module.prune = False
        assert encoder(rows, lengths=[6, 20]).shape == (26, 8)
    assert encoder.stats.eager == {"content pruning": 2}
    assert encoder.stats.replays.total() == 2


class Centred(nn.Module):
    """Takes the mean of all rows off each: padding is mixed in."""

    def forward(self, x):
        return x - x.mean(0)


def test_a_mean_over_all_rows_takes_padding_in():
    encoder = vg.GraphedEncoder(
        Centred(), [64], vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths()), backend="tape", verify=UNVERIFIED
    )
    rows = rows_for([6])
    encoder(rows, lengths=[6])
    encoder.poison()
    assert encoder(rows, lengths=[6]).isnan().all()
    assert encoder.eager(rows, lengths=[6]).isfinite().all()


def test_hooks_that_a_function_in_the_place_of_the_module_passes_over_are_warned_of():
    module = nn.Sequential(nn.Linear(8, 8))  # its argument has another name
    encoder = attention_encoder(module=module, spec=vg.BufferSpec("x", vg.Lengths()), forward=lambda m, x: m[0](x))
    rows = rows_for([6])
    expected = encoder(rows, lengths=[6])
    module.register_forward_hook(lambda module, args, output: output * 100)
    with pytest.warns(UserWarning, match="hooks on parts that this function does not call see nothing"):
        torch.testing.assert_close(encoder(rows, lengths=[6]), expected)
    assert encoder.stats.eager == {"forward hooks": 1}


@pytest.mark.parametrize("forward", [None, lambda module, x: module.linear(x)])
def test_hooks_see_and_change_what_came_by_position(forward):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, lengths=None):
            return self.linear(x)

    module, rows, seen = Takes().eval(), rows_for([6]), []
    encoder = encoder_of(module, forward=forward)
    module.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    module.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    torch.testing.assert_close(encoder(rows, lengths=[6]), module.linear(rows * 2))
    torch.testing.assert_close(encoder(rows, [6]), module.linear(rows * 2))
    assert all(torch.equal(x, rows * 2) for x in seen)
    assert encoder.stats.eager == {"forward hooks": 2}
