"""Scenarios of groups of processes over gloo, for tests/parallel/test_data.py."""

import datetime
import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.clips import clip_rows, clips_encoder
from tests.support.encoders import SIMULATED, UNVERIFIED, Attention, attention_encoder, attention_spec, rows_for
from tests.support.hidden_states import layers_encoder
from tests.support.inputs import BUDGETS as BUDGETS_OF_INPUTS
from tests.support.inputs import SPECS, Mixed, call_of
from tests.support.padded import packed_encoder, padded_batch, pooling_encoder
from tests.support.prefixed import images, prefixed
from tests.support.ranks import TIMEOUT, check_on_all_ranks, fork_groups, runs_of
from tests.support.shrinking import SUBSAMPLING, Subsampling, shrinking, subsampled
from tests.support.thirds import thirds_encoder, thirds_rows
from tests.support.towers import distance, equal_bits, pixels, qwen3_vl_tower
from varlen_graphs.parallel.ranks import Ranks
from varlen_graphs.routing.costs import Costs

unchecked_encoder = partial(attention_encoder, verify=UNVERIFIED)

LENGTHS = [
    [5],  # fewer items than ranks
    [3, 60, 4, 20],
    [100, 5],  # 20 : 1
    [1, 2, 3, 4, 5, 6, 7],
    [60] * 9,  # several replays a rank
    [300, 3],  # an item that no budget holds
]


def parallel(encoder, **options):
    return vg.parallel.DataParallelEncoder(encoder, **options)


# Results


def any_lengths(rank, ranks):
    encoder = attention_encoder()
    both = parallel(encoder)
    for seed, lengths in enumerate(LENGTHS):
        rows = rows_for(lengths, seed)
        check_on_all_ranks(both(rows, lengths=torch.tensor(lengths)), encoder.eager(rows, lengths=lengths))
    assert encoder.stats.items < sum(map(len, LENGTHS))  # others did their share


def any_call_equals_that_of_one_encoder(rank, ranks):
    """Derandomized, so that all ranks draw the same calls; not shrunk, which they would do apart."""
    encoder = unchecked_encoder()
    both, spread = parallel(encoder), parallel(encoder, inputs="spread")

    @settings(max_examples=12, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(st.lists(st.integers(1, 150), min_size=1, max_size=12), st.integers(0, 12))
    def compare(lengths, cut):
        rows = rows_for(lengths)
        check_on_all_ranks(both(rows, lengths=lengths), encoder.eager(rows, lengths=lengths))
        runs = [lengths[:cut], lengths[cut:]] + [[]] * (ranks - 2)
        own = rows.split([sum(run) for run in runs])[rank]
        check_on_all_ranks(spread(own, lengths=runs[rank]), encoder.eager(rows, lengths=lengths))

    compare()


def every_item_is_encoded_once(rank, ranks):
    encoder = unchecked_encoder()
    both = parallel(encoder)
    both(rows_for([3]), lengths=[3])
    told, before = [None] * ranks, encoder.stats.items
    both(rows_for([30, 2, 2, 2, 28]), lengths=[30, 2, 2, 2, 28])
    dist.all_gather_object(told, encoder.stats.items - before)
    assert sum(told) == 5
    assert sorted(told) == ([1, 1, 3] if ranks == 3 else [2, 3])


def items_are_spread_by_what_rank_0_measured(rank, ranks):
    encoder = unchecked_encoder()
    slower = 1 + rank  # no two ranks measure the same
    encoder.costs = Costs({b: slower * b.rows / 100 for b in encoder.budgets}, slower**2 / 1000, host=50.0)
    both, lengths = parallel(encoder), [40, 20, 20, 20, 20]
    rows, before = rows_for(lengths), encoder.stats.items
    check_on_all_ranks(both(rows, lengths=lengths), encoder.eager(rows, lengths=lengths))
    items = encoder.stats.items - before - 3  # of one and of two it finds out what outputs are like
    assert items == (1 if rank == 0 else 4)  # by rows alone it would be 2 and 3


def ranks_that_capture_between_calls(rank, ranks):
    """Each what it wants: one may run eager what another one replays."""
    spec = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))
    encoder = unchecked_encoder(spec=spec, capture=vg.options.Capture(lazy=True))
    both = parallel(encoder)
    for seed, lengths in enumerate(LENGTHS):
        rows = rows_for(lengths, seed)
        check_on_all_ranks(both(rows, lengths=torch.tensor(lengths)), encoder.eager(rows, lengths=lengths))
        if rank == seed % ranks:
            encoder.capture_pending(None)
    assert encoder.stats.eager["not captured yet"]


def padding_that_holds_nan(rank, ranks):
    encoder = unchecked_encoder()
    both = parallel(encoder)
    rows = rows_for([7, 30, 11])
    before = both(rows, lengths=[7, 30, 11])
    encoder.poison()
    assert equal_bits(both(rows, lengths=[7, 30, 11]), before)


def a_tower_with_deepstack_features(rank, ranks):
    tower = qwen3_vl_tower()
    encoder = vg.recipes.qwen3_vl(tower, [vg.budgets.Budget(128, items=4)], verify=UNVERIFIED, **SIMULATED)
    both = parallel(encoder)
    for grid in ([(1, 8, 8)], [(1, 6, 4), (3, 6, 4), (1, 8, 14), (2, 4, 4), (1, 2, 2)], [(4, 4, 6), (1, 10, 10)]):
        rows, grid_thw = pixels(grid), torch.tensor(grid)
        with torch.no_grad():
            expected = tower(rows, grid_thw=grid_thw)
        check_on_all_ranks(both(rows, grid_thw=grid_thw), expected)
    hidden = both(rows, grid_thw=grid_thw, output_hidden_states=True)
    assert distance(hidden, tower(rows, grid_thw=grid_thw, output_hidden_states=True)) <= 1e-5
    with torch.no_grad():
        tower.forward = both  # in the place of the tower's own
        check_on_all_ranks(tower(rows, grid_thw=grid_thw), expected)


class Several(Attention):
    """Outputs of several dtypes, one below the other, and a path that gives fewer."""

    def forward(self, x, cu_seqlens, max_seqlen, starts, more=True):
        x = super().forward(x, cu_seqlens, max_seqlen)
        bytes_ = (x[:, :3] > 0).to(torch.uint8)  # so that what follows would not be aligned by itself
        first = x[starts] if more else None
        return {"pair": (x.double(), [bytes_, None]), "first": first, "across": x.mT, "sign": x[:, 0] > 0, "kind": 7}


def outputs_of_any_structure(rank, ranks):
    declared = vg.outputs.Fields(
        pair=vg.outputs.Rows(), first=vg.outputs.Items(), across=vg.outputs.Rows(rows_dim=1), sign=vg.outputs.Rows()
    )
    starts = vg.buffers.DeviceBuffer("starts", lambda table: table.item_starts.clamp(max=table.budget.rows - 1))
    spec = attention_spec(buffers=[vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen(), starts], outputs=declared)
    encoder = unchecked_encoder(module=Several(), spec=spec)
    both = parallel(encoder)
    for more in (True, False, True):
        for lengths in ([5], [9, 1, 30, 3]):
            rows = rows_for(lengths)
            out, expected = (run(rows, lengths=lengths, more=more) for run in (both, encoder.eager))
            assert out.pop("kind") == expected.pop("kind") == 7
            check_on_all_ranks(out, expected)
            assert out["pair"][1][1] is None
            assert (out["first"] is None) is not more


def hidden_states_of_all_layers(rank, ranks):
    encoder = layers_encoder()
    both = parallel(encoder)
    for asks in (True, False, True):
        for lengths in ([5], [9, 1, 30, 3, 60, 60, 60]):
            rows = rows_for(lengths)
            out, expected = (run(rows, lengths=lengths, output_hidden_states=asks) for run in (both, encoder.eager))
            check_on_all_ranks(out, expected)
            assert ("hidden_states" in out) is asks
    assert not encoder.stats.eager


def groups_that_stay_together(rank, ranks):
    encoder = clips_encoder()
    both = parallel(encoder)
    sizes, times = [(2, 3), (4, 4), (1, 2), (3, 3), (2, 2)], [[0, 2, 5], 1, [3]]
    rows = clip_rows(sizes)
    check_on_all_ranks(both(rows, sizes=sizes, times=times), encoder.eager(rows, sizes=sizes, times=times))
    few = clip_rows(sizes[:3])
    check_on_all_ranks(
        both(few, sizes=sizes[:3], times=times[:1]), encoder.eager(few, sizes=sizes[:3], times=times[:1])
    )


def entries_and_columns_of_all_items(rank, ranks):
    encoder = thirds_encoder()
    for lengths in ([4], [7, 30, 2, 50, 6]):
        rows = thirds_rows(lengths)
        check_on_all_ranks(parallel(encoder)(rows, lengths=lengths), encoder.eager(rows, lengths=lengths))
    lengths, runs = runs_of([7, 30, 2, 50], ranks)
    rows = thirds_rows(lengths)
    own = rows.split([sum(run) for run in runs])[rank]
    check_on_all_ranks(
        parallel(encoder, inputs="spread")(own, lengths=runs[rank]), encoder.eager(rows, lengths=lengths)
    )


def padded_batches(rank, ranks):
    encoder = pooling_encoder()
    both = parallel(encoder)
    for lengths in ([6], [16, 3, 9, 40, 6, 6, 7]):
        x, _ = padded_batch(lengths, length=44)
        check_on_all_ranks(both(x, lengths=lengths), encoder.eager(x, lengths=lengths))


def padded_batches_that_are_spread(rank, ranks):
    encoder = pooling_encoder()
    lengths, runs = runs_of([16, 3, 9, 40, 6], ranks)
    x, _ = padded_batch(lengths)
    longest = [max(run, default=1) for run in runs]
    own = x.split([len(run) for run in runs])[rank][:, : longest[rank]]
    check_on_all_ranks(parallel(encoder, inputs="spread")(own, lengths=runs[rank]), encoder.eager(x, lengths=lengths))


def batches_packed_on_their_way_in(rank, ranks):
    encoder = packed_encoder()
    both = parallel(encoder)
    for lengths in ([6], [16, 3, 9, 40, 6]):
        x, mask = padded_batch(lengths, length=44)
        check_on_all_ranks(both(x, lengths=lengths, mask=mask), encoder.eager(x, lengths=lengths, mask=mask))
    lengths, runs = runs_of(lengths, ranks)
    x, mask = padded_batch(lengths)
    own = [part.split([len(run) for run in runs])[rank] for part in (x, mask)]
    spread = parallel(encoder, inputs="spread")
    check_on_all_ranks(spread(own[0], lengths=runs[rank], mask=own[1]), encoder.eager(x, lengths=lengths, mask=mask))


def inputs_that_are_spread(rank, ranks):
    encoder = unchecked_encoder()
    spread = parallel(encoder, inputs="spread")
    for items in (LENGTHS[1], LENGTHS[4]):
        lengths, runs = runs_of(items, ranks)
        rows = rows_for(lengths)
        own = rows.split([sum(run) for run in runs])[rank]
        check_on_all_ranks(spread(own, lengths=runs[rank]), encoder.eager(rows, lengths=lengths))


def tensors_beside_the_rows(rank, ranks):
    for kind in SPECS:
        encoder = vg.GraphedEncoder(Mixed().eval(), BUDGETS_OF_INPUTS[kind], SPECS[kind], backend="tape")
        both = parallel(encoder)
        for lengths in ([6], [20, 12, 3, 30, 7]):
            call = call_of(kind, lengths)
            check_on_all_ranks(both(**call), encoder.eager(**call))
    encoder = vg.GraphedEncoder(Mixed().eval(), BUDGETS_OF_INPUTS["packed"], SPECS["packed"], backend="tape")
    lengths, runs = runs_of([20, 12, 3, 30, 7], ranks)
    call, own = call_of("packed", lengths), {}
    for name, value in call.items():
        if name in ("ids", "kinds"):
            own[name] = value.split([sum(run) for run in runs])[rank]
        elif name in ("t", "label"):
            own[name] = value.split([len(run) for run in runs])[rank]
    own |= {"scale": call["scale"], "prompt": call["prompt"], "lengths": runs[rank]}
    check_on_all_ranks(parallel(encoder, inputs="spread")(**own), encoder.eager(**call))


def prefix_rows_and_rows_that_become_fewer(rank, ranks):
    encoder = prefixed()
    for sizes in ([(3, 4)], [(2, 2), (6, 8), (1, 5), (4, 4), (7, 3)]):
        x = images(sizes)
        check_on_all_ranks(parallel(encoder)(x, sizes=sizes), encoder.eager(x, sizes=sizes))
    encoder = shrinking(Subsampling(), SUBSAMPLING)
    for lengths in ([9], [40, 3, 64, 20, 33, 7]):
        x, _ = subsampled(lengths)
        check_on_all_ranks(parallel(encoder)(x, lengths=lengths), encoder.eager(x, lengths=lengths))
    lengths, runs = runs_of([40, 3, 64, 20], ranks)
    x, _ = subsampled(lengths)
    own = x.split([len(run) for run in runs])[rank][:, : max(runs[rank], default=1)]
    check_on_all_ranks(parallel(encoder, inputs="spread")(own, lengths=runs[rank]), encoder.eager(x, lengths=lengths))


def calls_that_run_eager(rank, ranks):
    encoder = attention_encoder(backend="eager")
    rows = rows_for([3, 60, 4])
    check_on_all_ranks(parallel(encoder)(rows, lengths=[3, 60, 4]), encoder.eager(rows, lengths=[3, 60, 4]))


def an_item_too_large_for_graphs_is_run_by_itself(rank, ranks):
    """Also while ranks learn what outputs are like: two of it might be more than there is memory for."""

    class Seen(Attention):
        rows = 0

        def forward(self, x, cu_seqlens, max_seqlen):
            self.rows = max(self.rows, len(x))
            return super().forward(x, cu_seqlens, max_seqlen)

    encoder = unchecked_encoder(module=Seen())
    rows = rows_for([1000])
    check_on_all_ranks(parallel(encoder)(rows, lengths=[1000]), encoder.eager(rows, lengths=[1000]))
    assert encoder.module.rows == 1000


def calls_that_graphs_do_not_answer_meet_once(rank, ranks):
    encoder = unchecked_encoder(eager_if=lambda module: "pruned")
    both, met = parallel(encoder), []
    exchange = Ranks.exchange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "exchange", lambda *args: met.append(args) or exchange(*args))
        for _ in range(3):
            check_on_all_ranks(both(rows_for([5, 3]), lengths=[5, 3]), encoder.eager(rows_for([5, 3]), lengths=[5, 3]))
    assert len(met) == 1


def calls_under_any_autocast(rank, ranks):
    spec = vg.BufferSpec("input", vg.Lengths())
    encoder = vg.GraphedEncoder(nn.Linear(8, 8), [64], spec, backend="tape", verify=UNVERIFIED)
    for options in ({}, {"inputs": "spread"}):
        both = parallel(encoder, **options)
        lengths, runs = runs_of([5, 6, 7, 30], ranks)
        rows = rows_for(lengths)
        own = rows.split([sum(run) for run in runs])[rank]
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                got = both(own, lengths=runs[rank]) if options else both(rows, lengths=lengths)
                assert got.dtype == dtype
                check_on_all_ranks(got, encoder.eager(rows, lengths=lengths), tolerance=1e-2)


class Positive(nn.Module):
    """Takes no rows but those of calls."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.eval()

    def forward(self, x):
        if not (x > 0).all():
            raise ValueError("synthetic rows")
        return x * self.scale


def an_eager_module_sees_no_rows_but_those_of_calls(rank, ranks):
    for inputs in ("whole", "spread"):
        encoder = vg.GraphedEncoder(Positive(), [64], vg.BufferSpec("x", vg.Lengths()), backend="eager")
        lengths, runs = runs_of([5, 6, 7, 30], ranks) if inputs == "spread" else ([5, 6, 7, 30], None)
        rows = rows_for(lengths).abs() + 1
        own = rows if runs is None else rows.split([sum(run) for run in runs])[rank]
        check_on_all_ranks(parallel(encoder, inputs=inputs)(own, lengths=runs[rank] if runs else lengths), rows)


# Training


def calls_that_need_gradients_run_whole_on_every_rank(rank, ranks):
    module, lengths = nn.Linear(8, 8), [5, 3, 30]
    encoder = vg.GraphedEncoder(module.eval(), [64], vg.BufferSpec("input", vg.Lengths()), backend="tape")
    both, rows = parallel(encoder), rows_for(lengths)
    check_on_all_ranks(both(rows, lengths=lengths), encoder.eager(rows, lengths=lengths))
    with torch.enable_grad():
        expected = torch.autograd.grad(module(rows).square().sum(), list(module.parameters()))
        for _ in range(2):
            loss = both.encoder.train() and both(rows, lengths=lengths).square().sum()
            for found, one in zip(torch.autograd.grad(loss, list(module.parameters())), expected, strict=True):
                torch.testing.assert_close(found, one)
        encoder.eval()
        leaf = rows.clone().requires_grad_()
        (found,) = torch.autograd.grad(both(leaf, lengths=lengths).sum(), [leaf])
        torch.testing.assert_close(found, torch.autograd.grad(module(leaf).sum(), [leaf])[0])
        assert not both(rows, lengths=lengths).requires_grad
    assert encoder.stats.eager == {"the module is trained": 2, "rows require grad": 1}


def a_call_that_needs_gradients_on_one_rank_raises_on_every_rank(rank, ranks):
    both, rows = parallel(unchecked_encoder()), rows_for([5, 3])
    with (
        torch.enable_grad(),
        pytest.raises(vg.errors.RankError, match=r"rank 1 was called with .*rows require grad.*rank 0 with"),
    ):
        both(rows.requires_grad_(rank == 1), lengths=[5, 3])
    check_on_all_ranks(both(rows, lengths=[5, 3]), both.encoder.eager(rows, lengths=[5, 3]))


def training_is_refused_where_inputs_are_spread(rank, ranks):
    encoder = unchecked_encoder()
    spread, rows = parallel(encoder, inputs="spread"), rows_for([5])
    with torch.enable_grad():
        encoder.train()
        with pytest.raises(
            vg.errors.InputError, match="the module is trained: with inputs='spread' outputs of other ranks"
        ):
            spread(rows, lengths=[5])
    encoder.eval()
    assert spread(rows, lengths=[5]).shape == (5 * ranks, 8)


# Mistakes


class Centred(nn.Module):
    """Centres rows by the mean of the first ones."""

    def __init__(self):
        super().__init__()
        self.mean, self.scale = None, nn.Parameter(torch.ones(()))
        self.eval()

    def forward(self, x):
        self.mean = x.mean(0) if self.mean is None else self.mean
        return (x - self.mean) * self.scale


def a_module_that_keeps_its_first_rows_is_refused(rank, ranks):
    rows, lengths = rows_for([5, 6, 7]), [5, 6, 7]
    for options in (
        {"backend": "eager"},
        {"backend": "tape", "capture": vg.options.Capture(lazy=True)},
        {"backend": "tape"},
    ):
        for inputs in ("whole", "spread"):
            encoder = vg.GraphedEncoder(Centred(), [64], vg.BufferSpec("x", vg.Lengths()), **options)
            both = parallel(encoder, inputs=inputs)
            with pytest.raises(vg.errors.CaptureError, match="Centred keeps what it computes from rows in 'mean'"):
                both(rows, lengths=lengths)
            assert encoder.module.mean is None
            expected = encoder.eager(rows, lengths=lengths)
            assert distance(both(rows, lengths=lengths)[: len(rows)], expected) <= 1e-5


def a_wrong_call_raises_on_every_rank(rank, ranks):
    encoder = unchecked_encoder(on_miss="error")
    both = parallel(encoder)
    for wrong, error in (
        ([3, 4], vg.errors.LayoutError),
        ([6, -1], vg.errors.LayoutError),
        ([], vg.errors.LayoutError),
    ):
        with pytest.raises(error):
            both(rows_for([5]), lengths=wrong)
    with pytest.raises(vg.errors.BudgetError, match="item 1 is"):
        both(rows_for([5, 300]), lengths=[5, 300])
    for lengths in ([5, 6], [5, 0, 6]):
        check_on_all_ranks(both(rows_for(lengths), lengths=lengths), encoder.eager(rows_for(lengths), lengths=lengths))


def a_first_call_that_differs_raises_on_every_rank(rank, ranks):
    both = parallel(unchecked_encoder())
    with pytest.raises(vg.errors.RankError, match=r"rank 1 was called with .* expected the same call on every rank"):
        both(rows_for([5 + rank]), lengths=[5 + rank])
    check_on_all_ranks(both(rows_for([5]), lengths=[5]), both.encoder.eager(rows_for([5]), lengths=[5]))


def a_first_call_that_is_wrong_on_one_rank_raises_on_every_rank(rank, ranks):
    """At once: the group is of use afterwards."""
    rows = rows_for([5, 6])
    reasons = ["off"] if rank == 1 else []  # in one call
    eager = {"eager_if": lambda _: reasons.pop() if reasons else None}
    for error, others, options, wrong in (
        (vg.errors.LayoutError, "rank 1 raised .*LayoutError", {}, {"lengths": [5, 60]}),
        (vg.errors.InputError, "rank 1 raised .*no argument 'size'", {}, {"lengths": [5, 6], "size": 3}),
        (
            vg.errors.BudgetError,
            "rank 1 raised .*BudgetError",
            {"on_miss": "error"},
            {"lengths": [300], "x": rows_for([300])},
        ),
        (vg.errors.RankError, "rank 1 was called with .*graphs do not run", eager, {"lengths": [5, 6]}),
    ):
        both = parallel(unchecked_encoder(**options))
        call = {"x": rows, "lengths": [5, 6]}
        with pytest.raises(error if rank == 1 else vg.errors.RankError, match=None if rank == 1 else others):
            both(**(call | wrong if rank == 1 else call))
        check_on_all_ranks(both(**call), both.encoder.eager(**call))


class Switched(Attention):
    """Takes an argument that changes nothing."""

    def forward(self, x, cu_seqlens, max_seqlen, switch=None):
        return super().forward(x, cu_seqlens, max_seqlen)


def static_arguments_that_ranks_cannot_compare_are_named(rank, ranks):
    rows, lengths = rows_for([5, 6]), [5, 6]
    for inputs in ("whole", "spread"):
        both = parallel(unchecked_encoder(module=Switched()), inputs=inputs)
        no_copy, may_change = "expected a value that can be pickled, and", "may change, while the graphs"
        refused = {
            (lambda: None): no_copy,
            check_on_all_ranks: no_copy,
            object(): may_change,
            (1, object()): may_change,
        }
        for switch, why in refused.items():
            error = vg.errors.SpecError if why == no_copy else vg.errors.InputError
            with pytest.raises(error, match=f"argument 'switch' is .*{why}"):
                both(rows, lengths=lengths, switch=switch)
            only = {"switch": switch} if rank == 1 else {}
            with pytest.raises(error if rank == 1 else vg.errors.RankError, match="argument 'switch' is"):
                parallel(both.encoder, inputs=inputs)(rows, lengths=lengths, **only)
        for switch in (vg.outputs.Rows(every=2), ("on", 1), torch.float16):
            out = both(rows, lengths=lengths, switch=switch)
            assert distance(out[: len(rows)], both.encoder.eager(rows, lengths=lengths)) <= 1e-5


def a_capture_that_fails_on_one_rank_raises_on_every_rank(rank, ranks):
    class Fails(Attention):
        def forward(self, x, cu_seqlens, max_seqlen):
            if rank == 1:
                raise MemoryError("no memory is left")
            return super().forward(x, cu_seqlens, max_seqlen)

    expected = (MemoryError, "no memory") if rank == 1 else (vg.errors.RankError, "rank 1 raised .* no memory is left")
    with pytest.raises(expected[0], match=expected[1]):
        parallel(unchecked_encoder(module=Fails()))(rows_for([5]), lengths=[5])


def a_wrong_call_of_one_rank_raises_on_every_rank_where_inputs_are_spread(rank, ranks):
    spread = parallel(unchecked_encoder(), inputs="spread")
    lengths = [5, 1] if rank == 1 else [5]
    expected = (
        (vg.errors.LayoutError, "describes 2 items")
        if rank == 1
        else (vg.errors.RankError, "rank 1 raised .*LayoutError")
    )
    with pytest.raises(expected[0], match=expected[1]):
        spread(rows_for([5]), lengths=lengths)
    with pytest.raises(vg.errors.InputError, match="no rank has items"):
        spread(rows_for([]), lengths=[])
    with pytest.raises(vg.errors.RankError, match="expected the same call on every rank"):
        spread(rows_for([5]), lengths=[5], scale=1.5 + rank)
    assert spread(rows_for([5]), lengths=[5]).shape == (5 * ranks, 8)


class Counts(Attention):
    """Gives Python values beside its rows, by a function of what it is called with."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, x, cu_seqlens, max_seqlen):
        return {"y": super().forward(x, cu_seqlens, max_seqlen), "value": self.values(x, cu_seqlens)}


def values_that_depend_on_the_items_raise_on_every_rank(rank, ranks):
    spec, lengths = attention_spec(outputs=vg.outputs.Fields(y=vg.outputs.Rows())), [5, 6, 7, 30]
    rows = rows_for(lengths)
    for values in (lambda x, _: x.shape[0], lambda _, cu_seqlens: len(cu_seqlens) - 1):
        for options in ({"backend": "eager"}, {"capture": vg.options.Capture(lazy=True)}, {}):
            for inputs in ("whole", "spread"):
                both = parallel(unchecked_encoder(module=Counts(values), spec=spec, **options), inputs=inputs)
                for _ in range(2):
                    with pytest.raises(vg.errors.SpecError, match="Python values that depend on the items"):
                        both(rows, lengths=lengths)


def values_that_only_some_items_change_raise_on_every_rank(rank, ranks):
    """What the first call does not show: one rank finds it, in step with the others."""
    spec = attention_spec(outputs=vg.outputs.Fields(y=vg.outputs.Rows()))
    module = Counts(lambda _, cu_seqlens: bool(cu_seqlens.diff().max() > 20))
    both = parallel(attention_encoder(module=module, spec=spec, backend="eager"))
    rows, lengths = rows_for([5, 6, 7]), [5, 6, 7]
    assert both(rows, lengths=lengths)["value"] is False
    expected = (
        (vg.errors.SpecError, "depend on the items")
        if rank == 0
        else (vg.errors.RankError, r"ranks \[0\] raised an error")
    )
    with pytest.raises(expected[0], match=expected[1]):
        both(rows_for([30, 3, 3]), lengths=[30, 3, 3])
    assert both(rows, lengths=lengths)["value"] is False  # ranks are still in step


def a_process_outside_of_the_group(rank, ranks):
    group = dist.new_group([0, 1])
    if rank < 2:
        check_pair(parallel(unchecked_encoder(), group=group))
    else:
        with pytest.raises(vg.errors.SpecError, match="process 2 is not in the group"):
            parallel(unchecked_encoder(), group=group)


def check_pair(both):
    rows = rows_for([5, 6, 7])
    assert distance(both(rows, lengths=[5, 6, 7]), both.encoder.eager(rows, lengths=[5, 6, 7])) <= 1e-5


class Before(nn.Module):
    """Calls a function before it gives what it was given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.before = lambda: None

    def forward(self, x):
        self.before()
        return x * self.scale


def an_error_while_one_rank_encodes_raises_on_every_rank(rank, ranks):
    module = Before()
    encoder = vg.GraphedEncoder(module, [64], vg.BufferSpec("x", vg.Lengths()), backend="eager")
    both, rows, lengths = parallel(encoder), rows_for([5] * 6), [5] * 6
    check_on_all_ranks(both(rows, lengths=lengths), rows)

    def fail():
        raise MemoryError("no memory is left")

    module.before = fail if rank == 1 else lambda: None
    expected = (MemoryError, "no memory") if rank == 1 else (vg.errors.RankError, r"ranks \[1\] raised an error")
    with pytest.raises(expected[0], match=expected[1]):
        both(rows, lengths=lengths)
    module.before = lambda: None
    check_on_all_ranks(both(rows, lengths=lengths), rows)  # ranks are still in step
    both.check()


def a_module_that_was_cast_is_told_so(rank, ranks):
    module = Before()
    both = parallel(vg.GraphedEncoder(module, [64], vg.BufferSpec("x", vg.Lengths()), backend="eager"))
    both(rows_for([5] * 6), lengths=[5] * 6)
    module.double()
    with pytest.raises(vg.errors.SpecError, match="make a new DataParallelEncoder"):
        both(rows_for([5] * 6), lengths=[5] * 6)
    assert parallel(both.encoder)(rows_for([5] * 6), lengths=[5] * 6).dtype == torch.float64


def a_tracer_sees_the_module_itself_on_every_rank(rank, ranks):
    module = nn.Linear(8, 8).eval().requires_grad_(False)
    spec = vg.BufferSpec("input", vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64], spec, backend="eager")
    rows, other = rows_for([5] * 6), rows_for([5] * 6, seed=1)
    both = parallel(encoder)
    traced = torch.jit.trace(lambda x: both(x, lengths=[5] * 6), rows)
    torch.testing.assert_close(traced(other), module(other))
    with pytest.raises(vg.errors.InputError, match="expected inputs='whole'"):
        torch.jit.trace(lambda x: parallel(encoder, inputs="spread")(x, lengths=[5] * 6), rows)
    torch.testing.assert_close(both(other, lengths=[5] * 6), module(other))  # ranks are in step


# Ranks that are lost: each ends its group, so they come last


def lose(rank, before, **options):
    """Make two calls, in the second of which the last rank is lost; the seconds that others waited."""
    module = Before()
    spec = vg.BufferSpec("x", vg.Lengths())
    both = parallel(vg.GraphedEncoder(module, [64], spec, backend="eager"), **options)
    both(rows_for([5] * 6), lengths=[5] * 6)
    last = rank == dist.get_world_size() - 1
    module.before = before if last else lambda: None
    start = time.perf_counter()
    with pytest.raises(vg.errors.RankError, match="a rank of the group did not take part"):
        both(rows_for([5] * 6), lengths=[5] * 6)
    return time.perf_counter() - start


def a_rank_that_hangs_is_waited_for_until_the_timeout(rank, ranks):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    seconds = lose(rank, lambda: time.sleep(4), group=group)
    assert rank == ranks - 1 or seconds < 4


def a_rank_that_is_killed_raises_on_all_others(rank, ranks):
    seconds = lose(rank, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert seconds < TIMEOUT.total_seconds()


SCENARIOS = {
    "2 ranks": (
        2,
        [
            any_lengths,
            any_call_equals_that_of_one_encoder,
            every_item_is_encoded_once,
            items_are_spread_by_what_rank_0_measured,
            ranks_that_capture_between_calls,
            a_tower_with_deepstack_features,
            outputs_of_any_structure,
            hidden_states_of_all_layers,
            batches_packed_on_their_way_in,
            inputs_that_are_spread,
            a_wrong_call_of_one_rank_raises_on_every_rank_where_inputs_are_spread,
            a_tracer_sees_the_module_itself_on_every_rank,
            a_rank_that_hangs_is_waited_for_until_the_timeout,
        ],
    ),
    "3 ranks": (
        3,
        [
            any_lengths,
            any_call_equals_that_of_one_encoder,
            every_item_is_encoded_once,
            padding_that_holds_nan,
            groups_that_stay_together,
            entries_and_columns_of_all_items,
            padded_batches,
            padded_batches_that_are_spread,
            inputs_that_are_spread,
            tensors_beside_the_rows,
            prefix_rows_and_rows_that_become_fewer,
            calls_that_run_eager,
            an_item_too_large_for_graphs_is_run_by_itself,
            an_eager_module_sees_no_rows_but_those_of_calls,
            calls_that_need_gradients_run_whole_on_every_rank,
            a_call_that_needs_gradients_on_one_rank_raises_on_every_rank,
            training_is_refused_where_inputs_are_spread,
            a_module_that_keeps_its_first_rows_is_refused,
            calls_under_any_autocast,
            calls_that_graphs_do_not_answer_meet_once,
            a_wrong_call_raises_on_every_rank,
            a_first_call_that_differs_raises_on_every_rank,
            a_first_call_that_is_wrong_on_one_rank_raises_on_every_rank,
            static_arguments_that_ranks_cannot_compare_are_named,
            a_capture_that_fails_on_one_rank_raises_on_every_rank,
            an_error_while_one_rank_encodes_raises_on_every_rank,
            a_module_that_was_cast_is_told_so,
            values_that_depend_on_the_items_raise_on_every_rank,
            values_that_only_some_items_change_raise_on_every_rank,
            a_process_outside_of_the_group,
            a_rank_that_is_killed_raises_on_all_others,
        ],
    ),
}
"""The number of ranks of each group, and its scenarios, in the order in which it runs them."""


if __name__ == "__main__":
    fork_groups(SCENARIOS)
