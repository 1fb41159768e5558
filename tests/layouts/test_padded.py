"""`Mask` and `Lengths(padded=True)`: the module takes `[batch, length, ...]`, and the rest is as with packed rows."""

import re

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig, BertModel
from transformers import __version__ as transformers_version

import varlen_graphs as vg
from tests.support.padded import (
    BUDGETS,
    DIM,
    TRANSFORMER,
    Pooling,
    Transformer,
    one_by_one,
    padded_batch,
    pooling_encoder,
)
from tests.support.towers import distance, equal_bits
from varlen_graphs.capture.compiled import CompiledForward

POOLING = Pooling().eval()

MASK = vg.Mask("src_key_padding_mask", dtype=torch.bool, real=False)


def transformer(budgets=BUDGETS, module=TRANSFORMER, layout=MASK, shape=(DIM,), **options):
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=shape), layout, outputs=options.pop("declared", vg.outputs.Rows()))
    return vg.GraphedEncoder(module, budgets, spec, **({"backend": "tape"} | options))


def batch(lengths, length=None, seed=0, fill=torch.nan):
    """Return a padded batch and the mask of its padding."""
    x, real = padded_batch(lengths, length, seed, fill)
    return x, ~real


@pytest.fixture(scope="module")
def shared():
    """Captured once, for all examples of a property."""
    return transformer()


@pytest.fixture(scope="module")
def shared_pooling():
    return pooling_encoder()


lengths_of_items = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@settings(max_examples=30)
@given(lengths_of_items, st.integers(0, 40), st.integers(0, 3))
def test_any_batch_gives_each_item_as_if_it_were_alone_and_zeros_past_its_end(shared, lengths, more, seed):
    x, padding = batch(lengths, max(lengths) + more, seed)
    out = shared(x, src_key_padding_mask=padding)
    assert out.shape == x.shape
    assert not out[padding].any()
    assert distance(out, one_by_one(x, lengths)) < 1e-5
    assert distance(shared.eager(x, src_key_padding_mask=padding), out) < 1e-5


def test_the_padding_contract_holds_where_attention_multiplies_by_what_it_masks():
    encoder = transformer().capture()
    calls = [[48] * 4, [1], [16, 3, 9, 16], [48], [1] * 8, [48, 48, 1, 2], [40, 13]]
    for number, lengths in enumerate(calls):
        over_nan, over_leftovers = batch(lengths, seed=number), batch(lengths, seed=number, fill=7.0)
        encoder.poison()
        first = encoder(over_nan[0], src_key_padding_mask=over_nan[1])
        large = batch(calls[0], seed=100)
        encoder(large[0], src_key_padding_mask=large[1])
        second = encoder(over_leftovers[0], src_key_padding_mask=over_leftovers[1])
        assert equal_bits(first, second), lengths
        assert distance(first, one_by_one(over_nan[0], lengths)) < 1e-5
    assert not encoder.stats.eager


def test_a_batch_padded_to_a_fixed_length_costs_what_its_longest_item_costs():
    x, padding = batch([5, 12, 9], length=400)
    encoder = transformer()
    out = encoder(x, src_key_padding_mask=padding)
    assert out.shape == (3, 400, DIM)
    assert distance(out, one_by_one(x, [5, 12, 9])) < 1e-5
    assert encoder.stats.replays == {vg.budgets.Budget.padded(4, 16): 1}
    assert (encoder.stats.rows, encoder.stats.padding) == (26, 64 - 26)


def test_short_items_do_not_pay_for_long_ones_and_keep_their_places():
    lengths = [128, 3, 10, 120, 5, 16, 7, 9, 110, 115]
    encoder = transformer(
        [vg.budgets.Budget.padded(4, 128), vg.budgets.Budget.padded(8, 16), vg.budgets.Budget.padded(12, 128)]
    )
    x, padding = batch(lengths)
    encoder.capture()
    out = encoder(x, src_key_padding_mask=padding)
    assert distance(out, one_by_one(x, lengths)) < 1e-5
    assert encoder.stats.replays == {vg.budgets.Budget.padded(4, 128): 1, vg.budgets.Budget.padded(8, 16): 1}


def test_more_items_than_any_budget_has_are_several_replays():
    lengths = [5] * 21
    encoder = transformer()
    x, padding = batch(lengths)
    assert distance(encoder(x, src_key_padding_mask=padding), one_by_one(x, lengths)) < 1e-5
    assert sum(budget.items * count for budget, count in encoder.stats.replays.items()) >= 21
    assert encoder.stats.items == 21


def test_an_item_longer_than_every_budget_runs_eager_or_is_an_error():
    x, padding = batch([5, 50, 7], length=55)
    encoder = transformer()
    assert distance(encoder(x, src_key_padding_mask=padding), one_by_one(x, [5, 50, 7])) < 1e-5
    assert encoder.stats.eager == {"larger than every budget": 1}
    assert encoder.stats.replays.total() == 1
    with pytest.raises(vg.errors.BudgetError, match=r"item 1 is \(1, 1, 50\) and needs .*; add a larger budget"):
        transformer(on_miss="error")(x, src_key_padding_mask=padding)


def test_all_ways_to_mark_what_is_real_are_the_same():
    x, padding = batch([3, 9])
    expected = transformer()(x, src_key_padding_mask=padding)
    encoder = transformer()
    for mask in (padding.int(), padding.to(torch.uint8), padding.tolist(), padding.numpy(), padding.long().tolist()):
        assert torch.equal(encoder(x, src_key_padding_mask=mask), expected)
    assert torch.equal(encoder(x, padding), expected)  # by position, as the module takes it


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
@pytest.mark.parametrize("real", [True, False])
def test_the_module_sees_a_mask_of_the_declared_kind(dtype, real):
    class Seeing(nn.Module):
        def forward(self, x, mask, other):
            seen.append((mask.dtype, other.dtype))
            return {"x": x, "mask": mask, "other": other}

    seen = []
    mask_layout = vg.Mask("mask", dtype=dtype, real=real)
    spec = vg.BufferSpec("x", mask_layout, [vg.buffers.Mask("other", dtype=dtype, real=not real)])
    encoder = vg.GraphedEncoder(Seeing(), BUDGETS, spec, backend="tape")
    x, padding = batch([2, 5])
    out = encoder(x, mask=~padding if real else padding)
    assert {*seen} == {(dtype, dtype)}
    assert torch.equal(out["mask"] == 1, ~padding if real else torch.zeros_like(padding))  # past an end all is zero
    assert torch.equal(out["other"] == 1, torch.zeros_like(padding) if real else ~padding)


def test_lengths_describe_a_batch_too():
    encoder, (x, padding) = pooling_encoder(), batch([3, 9, 6], length=20, fill=3.0)
    for lengths in ([3, 9, 6], torch.tensor([3, 9, 6]), numpy.array([3, 9, 6])):
        out = encoder(x, lengths=lengths)
        with torch.no_grad():
            expected = POOLING(x, torch.tensor([3, 9, 6]), ~padding)
        for name in ("rows", "mean", "longest"):
            torch.testing.assert_close(out[name], expected[name])
    assert encoder.stats.replays.total() == 3


@settings(max_examples=30)
@given(lengths_of_items, st.integers(0, 40))
def test_pooled_outputs_follow_the_items_of_any_batch(shared_pooling, lengths, more):
    x, padding = batch(lengths, max(lengths) + more, fill=3.0)
    out = shared_pooling(x, lengths=lengths)
    with torch.no_grad():
        expected = POOLING(x, torch.tensor(lengths), ~padding)
    assert torch.equal(out.pop("longest"), expected.pop("longest"))
    assert distance(out, expected) < 1e-5


def with_its_mask_prepared(model, input_ids, mask):
    return model(input_ids, attention_mask=mask)


class Unpadding(nn.Module):
    """Takes a padded batch, and gives its real rows one after another."""

    def forward(self, x, real):
        place = torch.where(real, real.flatten().cumsum(0).view_as(real) - 1, real.numel())
        return x.new_zeros(real.numel() + 1, DIM).index_copy(0, place.flatten(), x.flatten(0, 1))[:-1]


@pytest.fixture(scope="module")
def unpadding():
    outputs = vg.outputs.Entries(lambda rows: rows, lambda budget: budget.rows)
    spec = vg.BufferSpec("x", vg.Lengths(padded=True), [vg.buffers.Mask("real")], outputs)
    return vg.GraphedEncoder(Unpadding(), BUDGETS, spec, backend="tape")


@settings(max_examples=30)
@given(lengths_of_items, st.integers(0, 40))
def test_outputs_of_a_padded_batch_may_be_packed(unpadding, lengths, more):
    x, padding = batch(lengths, max(lengths) + more)
    assert torch.equal(unpadding(x, lengths=lengths), x[~padding])
    assert torch.equal(unpadding.eager(x, lengths=lengths), x[~padding])


def test_a_text_encoder_of_transformers_takes_its_own_call():
    old = transformers_version.startswith("4.")  # takes no mask of four dimensions
    config = BertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, attn_implementation="eager" if old else "sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertModel(config).eval()
    encoder = vg.GraphedEncoder(
        model,
        vg.budgets.PaddedLadder(batch=4, length=48),
        vg.BufferSpec(
            rows=vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64, pad=1),
            layout=vg.Mask("attention_mask", dtype=torch.bool),
            buffers=[] if old else [vg.buffers.AttentionMask("mask")],
            outputs=vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), pooler_output=vg.outputs.Items()),
        ),
        forward=None if old else with_its_mask_prepared,
        backend="tape",
    )
    for lengths in ([48] * 4, [3], [20, 7, 31], [9, 40, 1, 2, 33, 8]):
        ids = torch.randint(2, 99, (len(lengths), max(lengths)))
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids[mask == 0] = 10**9  # no token
        out = encoder(ids, attention_mask=mask)
        with torch.no_grad():
            expected = model(ids * mask, attention_mask=mask)
        assert type(out) is type(expected)
        assert distance(out.pooler_output, expected.pooler_output) < 1e-5
        assert distance(out.last_hidden_state, expected.last_hidden_state * mask[..., None]) < 1e-5
    assert not encoder.stats.eager


def test_a_stage_hands_out_the_batch_to_write():
    for backend in ("tape", "eager"):
        encoder, (x, padding) = transformer(backend=backend), batch([3, 40, 9])
        with encoder.stage(torch.cat([padding, torch.ones(3, 5, dtype=torch.bool)], 1)) as stage:
            assert stage.rows.shape == (3, 40, DIM)  # as long as the longest item
            stage.rows.copy_(x)
        assert distance(stage.output, one_by_one(x, [3, 40, 9])) < 1e-5


def test_the_mask_of_a_stage_may_be_wider_than_what_it_marks():
    encoder, (x, padding) = transformer(), batch([3, 40, 9])
    with encoder.stage(torch.cat([padding, torch.ones(3, 2000, dtype=torch.bool)], 1)) as stage:
        stage.rows.copy_(x)
    assert distance(stage.output, one_by_one(x, [3, 40, 9])) < 1e-5


def test_columns_and_host_buffers_know_the_items_of_a_batch():
    class Marked(nn.Module):
        def forward(self, x, kinds, shares, longest):
            return x * kinds[:, None, None] + shares[:, None, None] + 0 * longest

    spec = vg.BufferSpec(
        rows="x",
        layout=vg.Lengths("lengths", columns=(vg.layouts.Column("kind"),), padded=True),
        buffers=[
            vg.buffers.DeviceBuffer("kinds", lambda table: table.column("kind")),
            vg.buffers.HostBuffer(
                "shares", lambda layout: torch.tensor([1 / n for n in layout.rows]), ("items",), torch.float32
            ),
            vg.buffers.MaxSeqlen("longest"),
        ],
    )
    encoder = vg.GraphedEncoder(Marked(), BUDGETS, spec, backend="tape")
    x, _ = batch([2, 4, 48, 16], fill=0.0)
    out = encoder(x, lengths=[2, 4, 48, 16], kind=[5, 6, 7, 8])
    for i, (n, kind) in enumerate(zip([2, 4, 48, 16], [5, 6, 7, 8], strict=True)):
        torch.testing.assert_close(out[i, :n], x[i, :n] * kind + 1 / n)
        assert not out[i, n:].any()


def test_hooks_and_static_arguments_work_as_with_packed_rows():
    encoder, (x, padding) = transformer(module=Transformer().eval()), batch([3, 9], fill=0.0)
    once, twice = (encoder(x, src_key_padding_mask=padding, scale=scale) for scale in (1.0, 2.0))
    torch.testing.assert_close(twice, 2 * once)
    handle = encoder.module.register_forward_hook(lambda *_: None)
    assert distance(encoder(x, src_key_padding_mask=padding), once) < 1e-5
    handle.remove()
    assert encoder.stats.eager == {"forward hooks": 1}


def test_one_compilation_serves_batches_of_two_items_and_more():
    compiled = CompiledForward(lambda x, mask: torch.where(mask[..., None], 0, x * x), backend="eager")
    for items, length in ((8, 48), (4, 48), (8, 16), (2, 16)):
        x, mask = torch.randn(items, length, DIM), torch.zeros(items, length, dtype=torch.bool)
        assert torch.equal(compiled(vg.budgets.Budget.padded(items, length), x=x, mask=mask), x * x)


def test_what_padding_held_does_not_reach_a_later_capture():
    class Embedding(nn.Embedding):
        def forward(self, ids, attention_mask, scale=1.0):
            return super().forward(ids) * scale

    spec = vg.BufferSpec(vg.inputs.Rows("ids", (), torch.int64), vg.Mask())
    encoder = vg.GraphedEncoder(Embedding(10, 4), [vg.budgets.Budget.padded(2, 4)], spec, backend="tape")
    ids, mask = torch.tensor([[1, 2, 3, 4], [5, 999, 999, 999]]), [[1, 1, 1, 1], [1, 0, 0, 0]]
    plain = encoder(ids, attention_mask=mask)
    assert torch.equal(encoder(ids, attention_mask=mask, scale=2.0), 2 * plain)


def test_a_ladder_has_every_number_of_items_with_every_length():
    budgets = list(vg.budgets.PaddedLadder(batch=6, length=100, min_length=20, step=2))
    assert {(b.items, b.max_seqlen) for b in budgets} == {(n, m) for n in (1, 2, 4, 6) for m in (32, 64, 100)}
    assert all(b.rows == b.items * b.max_seqlen and b.segments == b.items for b in budgets)
    assert {(b.items, b.max_seqlen) for b in vg.budgets.PaddedLadder(3, 10, 3, 10)} == {(3, 10)}


@given(st.integers(1, 40), st.integers(1, 600), st.integers(1, 40), st.integers(1, 600), st.floats(1.01, 4))
def test_every_ladder_reaches_both_its_ends_and_not_further(batch, length, min_batch, min_length, step):
    min_batch, min_length = min(min_batch, batch), min(min_length, length)
    budgets = list(vg.budgets.PaddedLadder(batch, length, min_batch, min_length, step))
    assert max(budgets) == vg.budgets.Budget.padded(batch, length)
    assert len({*budgets}) == len(budgets)
    assert min(b.items for b in budgets) == min_batch
    assert all(min_length <= b.max_seqlen <= length for b in budgets)


X, PADDING = batch([3, 5])

CALLS = {
    "padding on the left": (X, PADDING.flip(1), "src_key_padding_mask[0] marks 3 rows as real (0), but not the first 3"),
    "a hole": (X, [[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]], "[1] marks 4 rows as real (0), but not the first 4: expected items"),
    "other values": (X, [[0] * 5, [0, 0, 2, 2, 2]], "[1] has values other than 0 and 1: expected a key padding mask"),
    "another length": (X, PADDING[:, :4], "src_key_padding_mask is [2, 4], but the rows are [2, 5, 8]: expected a mask"),
    "another batch": (X, PADDING[:1], "describes 1 item, the longest of 3 rows, but x is [2, 5, 8]: expected [batch, len"),
    "no batch": (X[:0], PADDING[:0], "src_key_padding_mask is empty: expected a key padding mask"),
    "scores": (X, PADDING.float(), "is a torch.float32 tensor: expected a key padding mask [batch, length] of bool"),
    "four dimensions": (X, PADDING[:, None, None], "is [2, 1, 1, 5]: expected a key padding mask [batch, length]"),
    "a ragged list": (X, [[0], [0, 1]], "src_key_padding_mask is not a mask (expected sequence of length 1 at dim 1 (got 2))"),
    "a word": (X, "no", "src_key_padding_mask is not a mask ("),
}  # fmt: skip


@pytest.mark.parametrize(("x", "mask", "message"), CALLS.values(), ids=CALLS.keys())
def test_bad_masks_say_what_was_expected(shared, x, mask, message):
    with pytest.raises(vg.errors.LayoutError, match=re.escape(message)):
        shared(x, src_key_padding_mask=mask)
    assert distance(shared(X, src_key_padding_mask=PADDING), one_by_one(X, [3, 5])) < 1e-5


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 6], "lengths describes 2 items, the longest of 6 rows, but x is [2, 5, 8]: expected [batch, length, ...]"),
        ([3], "lengths describes 1 item, the longest of 3 rows, but x is [2, 5, 8]"),
        ([3, -1], "lengths[1] is -1: every size must be at least 0"),
        ([[3, 5]], "lengths[0] is [3, 5]: expected integers"),
    ],
)
def test_bad_lengths_say_what_was_expected(lengths, message):
    with pytest.raises(vg.errors.LayoutError, match=re.escape(message)):
        pooling_encoder()(X, lengths=lengths)


def test_rows_without_a_batch_are_refused():
    with pytest.raises(
        vg.errors.InputError, match=re.escape("x is [5, 8]: expected [batch, length, 8], a batch of items, each")
    ):
        transformer()(X[0], src_key_padding_mask=PADDING[0])
    with pytest.raises(vg.errors.InputError, match=re.escape("x is [2, 5, 9]: expected [batch, length, 8]")):
        transformer()(torch.zeros(2, 5, 9), src_key_padding_mask=PADDING)
    encoder = transformer(shape=None)
    encoder(X, src_key_padding_mask=PADDING)
    with pytest.raises(
        vg.errors.InputError, match=re.escape("x is [2, 5, 9]: expected [batch, length, 8], as captured")
    ):
        encoder(torch.zeros(2, 5, 9), src_key_padding_mask=PADDING)


def spec(buffers=(), layout=MASK, outputs=None):
    return vg.BufferSpec("x", layout, buffers, outputs or vg.outputs.Rows())


DECLARATIONS = {
    "a buffer of packed rows": (
        lambda: spec([vg.buffers.CuSeqlens()]), vg.errors.SpecError,
        "CuSeqlens(name='cu_seqlens', per='item', queries=None) is for packed rows, but Mask has padded ones; declare Attention",
    ),
    "a mask of packed rows": (
        lambda: spec([vg.buffers.Mask()], vg.Lengths()), vg.errors.SpecError,
        "is for padded rows, but Lengths has packed ones; declare",
    ),
    "an output in another dimension": (
        lambda: spec(outputs=[vg.outputs.Items(), vg.outputs.Rows(rows_dim=1)]), vg.errors.SpecError,
        "Rows(every=1, rows_dim=1, prefix=None): a padded batch is [batch, length, ...]; leave rows_dim out",
    ),
    "rows in another dimension": (
        lambda: vg.BufferSpec(vg.inputs.Rows("x", rows_dim=1), MASK), vg.errors.SpecError,
        "a padded batch is [batch, length, ...]; leave rows_dim out",
    ),
    "a mask of scores": (lambda: vg.Mask(dtype=torch.float32), vg.errors.SpecError, "expected torch.bool or an integer dtype"),
    "a buffer of scores": (lambda: vg.buffers.Mask(dtype=torch.half), vg.errors.SpecError, "expected torch.bool or an integer"),
    "a number of rows": (
        lambda: transformer([1024]), vg.errors.BudgetError,
        "max_seqlen=1024) does not describe a padded batch: expected rows = items * max_seqlen; write vg.budgets.Budget.padded(batch, le",
    ),
    "a budget of no items": (lambda: vg.budgets.Budget.padded(0, 8), vg.errors.BudgetError, "expected rows to be an integer of at least"),
    "a ladder without items": (lambda: vg.budgets.PaddedLadder(min_batch=0), vg.errors.BudgetError, "expected 1 <= min_batch <= batch and"),
    "a ladder upside down": (lambda: vg.budgets.PaddedLadder(length=8), vg.errors.BudgetError, "1 <= min_length <= length"),
    "a ladder without steps": (lambda: vg.budgets.PaddedLadder(step=1.0), vg.errors.BudgetError, "expected a step above 1 and at most 4"),
    "rows declared as items": (
        lambda: transformer([vg.budgets.Budget.padded(2, 80)], declared=vg.outputs.Items())(X, src_key_padding_mask=PADDING), vg.errors.SpecError,
        "the entries of the outputs depend on the budget",
    ),
    "items declared as rows": (
        lambda: vg.GraphedEncoder(
            POOLING, BUDGETS, vg.BufferSpec("x", vg.Lengths(padded=True), [vg.buffers.Mask("real")]), backend="eager"
        )(X, lengths=[3, 5]), vg.errors.SpecError,
        "an output of shape [2, 4] is declared as Rows() of a padded batch: expected [2, 5, ...] at",
    ),
    "a buffer that asks for packed rows": (
        lambda: vg.GraphedEncoder(
            POOLING, BUDGETS, backend="tape",
            buffer_spec=vg.BufferSpec("x", vg.Lengths(padded=True), [vg.buffers.DeviceBuffer("real", lambda table: table.row_item)]),
        )(X, lengths=[3, 5]), vg.errors.SpecError,
        "the item of each row is defined for packed rows only, but 'lengths' describes a padded batch: use real_rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), DECLARATIONS.values(), ids=DECLARATIONS.keys())
def test_bad_declarations_raise_named_errors(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


class ReadsPadding(torch.nn.Module):
    """Averages over padding, too."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)

    def forward(self, ids, mask):
        return self.embedding(ids).mean(1)


def test_where_graphs_were_wrong_eager_runs_find_the_padding_that_came(monkeypatch):
    module = ReadsPadding().eval()
    spec = vg.BufferSpec(
        vg.inputs.Rows("ids", shape=(), dtype=torch.int64), vg.Mask("mask"), outputs=vg.outputs.Items()
    )
    encoder = vg.GraphedEncoder(module, [vg.budgets.Budget.padded(4, 32)], spec, backend="tape")
    ids, mask = torch.full((2, 9), 17), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 5:] = 0
    with pytest.warns(UserWarning, match="failed verification"):
        torch.testing.assert_close(encoder(ids, mask=mask), module(ids, mask))
    for run in (encoder, encoder.eager, encoder.train()):
        torch.testing.assert_close(run(ids, mask=mask), module(ids, mask))
    monkeypatch.setenv("VARLEN_GRAPHS_DISABLE", "1")
    torch.testing.assert_close(encoder.eval()(ids, mask=mask), module(ids, mask))
    assert not encoder.stats.replays.total()


class SumsPadding(torch.nn.Module):
    """Adds up all rows of an item: of padding, too, which makes no difference while that holds zeros."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x, mask):
        return self.linear(x).sum(1)


def test_a_module_that_reads_what_padding_holds_is_found_by_a_call_that_brings_some():
    module = SumsPadding().eval()
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Mask("mask"), outputs=vg.outputs.Items())
    encoder = vg.GraphedEncoder(module, [vg.budgets.Budget.padded(4, 32)], spec, backend="tape")
    x, mask = torch.randn(2, 9, 8), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 5:] = 0
    for _ in range(3):
        torch.testing.assert_close(encoder(x, mask=mask), module(x, mask))
    assert dict(encoder.stats.eager) == {"its budget gave a wrong output": 2}
