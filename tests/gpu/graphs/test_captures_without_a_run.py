"""Captures without a run of their own, on real CUDA graphs: kernels are loaded in them, and attention is not timed."""

import warnings

import pytest
import torch

import varlen_graphs as vg
from tests.support import other_sizes
from tests.support.encoders import Attention, attention_spec, encoder_of, rows_for
from tests.support.gpu import on_gpus, rows_on_gpu
from tests.support.other_sizes import FOLLOWED, OtherwiseWhereSmall, table
from varlen_graphs.attention import timing

pytestmark = on_gpus()

BUDGETS = (32, 64, 96, 128, 192, 256)


@pytest.mark.parametrize("function", FOLLOWED, ids=lambda function: function.__name__)
def test_what_small_sizes_alone_do_is_followed(function):
    module = OtherwiseWhereSmall(function).to("cuda")
    encoder = encoder_of(module, budgets=BUDGETS, backend="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder.capture()
        for lengths in ([6], [20, 9], [50], [40, 50], [120], [200], [3, 2]):
            rows = rows_for(lengths, device="cuda")
            encoder.poison()
            torch.testing.assert_close(encoder(rows, lengths=lengths), module.linear(rows))
    assert not encoder.disabled
    assert not encoder.stats.eager


@pytest.mark.parametrize(("small", "returns"), [(100, False), (1000, False), (1000, True)])
def test_a_cache_outside_of_the_module_is_left_as_runs_leave_it(small, returns):
    table.cache_clear()
    module = OtherwiseWhereSmall(other_sizes.cached_outside, small, returns).to("cuda")
    encoder = encoder_of(module, budgets=BUDGETS, backend="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder.capture()
        for lengths in ([250], [20], [90], [60]):  # replays write to all memory of the pool
            encoder(rows_for(lengths, device="cuda"), lengths=lengths)
        encoder.poison()
        for rows in BUDGETS:
            assert bool((table(rows, torch.device("cuda", 0)) == 1).all()), rows


def test_a_capture_that_fails_after_it_filled_a_cache_outside_is_told_in_each_call():
    def function(module, x):
        return other_sizes.read(module, other_sizes.cached_outside(module, x))

    table.cache_clear()
    module, rows = OtherwiseWhereSmall(function).to("cuda"), rows_for([150], device="cuda")
    encoder = encoder_of(module, budgets=BUDGETS, backend="cuda")
    with pytest.raises(vg.errors.CaptureError, match="nothing has computed it: clear that cache"):
        encoder.capture()
    with pytest.raises(vg.errors.CaptureError, match="nothing has computed it: clear that cache"):
        encoder(rows, lengths=[150])  # the module itself is no judge any more


def test_what_no_graph_can_hold_is_refused_at_small_sizes_alone():
    module = OtherwiseWhereSmall(other_sizes.read).to("cuda")
    encoder = encoder_of(module, budgets=BUDGETS, backend="cuda")
    with pytest.warns(UserWarning, match=r"(?s)graph of .*rows could not be captured.*other_sizes\.py"):
        encoder.capture()
    assert {budget.rows for budget in encoder.disabled} == {32, 64, 96}
    rows = rows_for([6, 20], device="cuda")
    torch.testing.assert_close(encoder(rows, lengths=[6, 20]), module.linear(rows))
    assert encoder.stats.eager.total() == 0


def test_attention_is_timed_at_a_few_sizes():
    module, sizes = Attention(dim=128).to("cuda", torch.bfloat16), range(256, 8192 + 1, 256)
    spec, before = attention_spec(rows=vg.inputs.Rows("x", shape=(128,))), len(timing.results)
    encoder = vg.GraphedEncoder(module, [vg.budgets.Budget(rows, items=8) for rows in sizes], spec).capture()
    assert len(timing.results) - before < len(sizes) / 2
    assert len(encoder.executor.store) == len(sizes)
    for lengths in ([300], [900, 40], [5000, 12, 1100], [8192]):
        rows = rows_on_gpu(lengths, dim=128).bfloat16()
        ours, eager = encoder(rows, lengths=lengths), encoder.eager(rows, lengths=lengths)
        assert ((ours - eager).float().norm() / eager.float().norm()).item() < 2e-2
