"""`buffers.AttentionMask`: against plain loops and the masks of transformers, in whole models, and wrong ones."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.buffers.test_windows import windows_of
from tests.support import strategies
from tests.support.contract import check_padding_contract
from tests.support.dense import LAYOUTS, DenseAttention, dense_encoder, item_by_item
from tests.support.encoders import rows_for
from tests.support.padded import padded_batch
from tests.support.strategies import make_table
from tests.support.text_models import check_texts, error_of, masks_of, text_encoder, text_model, texts
from tests.support.towers import distance, equal_bits

LOWEST = torch.finfo(torch.float16).min

options = st.fixed_dictionaries(
    {"causal": st.booleans(), "window": st.tuples(st.integers(-1, 12), st.integers(-1, 12))}
)


def sees(query, key, causal, window):
    """Say as plainly as possible whether a query sees a key of its segment."""
    left, right = window
    near = (left < 0 or query - key <= left) and (right < 0 or causal or key - query <= right)
    return near and not (causal and key > query)


def padded_table(lengths, budget):
    return make_table([(1, 1, length) for length in lengths], budget, vg.Mask())


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 9), options)
def test_the_mask_of_a_padded_batch(lengths, items, more, how):
    length = max(lengths) + more
    table = padded_table(lengths, vg.budgets.Budget.padded(len(lengths) + items, length))
    got = vg.buffers.AttentionMask(**how).produce(table, None)
    assert got.dtype == torch.bool
    assert got.shape == (len(lengths) + items, 1, length, length)
    for item, real in enumerate([*lengths, *[0] * items]):
        for query in range(length):
            keys = range(real) if query < real else []
            expected = [key for key in keys if sees(query, key, **how)] or [query]
            assert got[item, 0, query].nonzero().flatten().tolist() == expected


@given(strategies.tables(), st.sampled_from(["item", "frame", "clip"]), options)
def test_the_mask_of_packed_rows(case, per, how):
    items, table = case
    segments = [h * w for t, h, w in items for _ in range(t)] if per == "frame" else [t * h * w for t, h, w in items]
    first, expected = 0, []
    for rows in segments:
        own = range(rows)
        expected += [[first + key for key in own if sees(query, key, **how)] for query in own]
        first += rows
    expected += [[row] for row in range(first, table.budget.rows)]
    got = vg.buffers.AttentionMask(per=per, **how).produce(table, None)
    assert got.shape == (1, 1, table.budget.rows, table.budget.rows)
    assert [row.nonzero().flatten().tolist() for row in got[0, 0]] == expected


@given(strategies.grids(merge=2, max_side=12, max_items=3), st.integers(1, 3))
def test_windows_of_grids_are_segments_too(items, side):
    windows = windows_of(items, side, 2)
    budget = vg.budgets.Budget(4 * sum(map(len, windows)) + 5, items=len(items), segments=len(windows) + 2)
    got = vg.buffers.AttentionMask(per=vg.layouts.Windows(side)).produce(
        make_table(items, budget, vg.GridTHW(merge=2)), None
    )
    expected = torch.block_diag(*[torch.ones(4 * len(window), 4 * len(window)) for window in windows], torch.eye(5))
    assert torch.equal(got[0, 0], expected.bool())


@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_a_floating_mask_is_added_to_scores(dtype):
    table = padded_table([2, 3], vg.budgets.Budget.padded(2, 3))
    got = vg.buffers.AttentionMask(causal=True, dtype=dtype).produce(table, nn.Linear(2, 2).half())
    rows = [[0, LOWEST, LOWEST], [0, 0, LOWEST], [LOWEST, LOWEST, 0]], [[0, LOWEST, LOWEST], [0, 0, LOWEST], [0, 0, 0]]
    assert torch.equal(got, torch.tensor(rows, dtype=torch.float16)[:, None])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 12), st.booleans(), st.booleans())
def test_masks_equal_those_of_transformers(lengths, window, causal, slides):
    masking = pytest.importorskip("transformers.masking_utils")
    length = max(lengths)
    if causal:
        made = masking.sliding_window_causal_mask_function(window) if slides else masking.causal_mask_function
    elif not hasattr(masking, "bidirectional_mask_function"):
        pytest.skip("this transformers makes no bidirectional masks")
    else:
        whole = masking.bidirectional_mask_function
        made = masking.sliding_window_bidirectional_mask_function(window) if slides else whole
    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    keys = real[:, None, None].expand(-1, 1, length, -1)
    row = torch.arange(length)
    pattern = made(row[:1], row[:1], row[:, None], row[None])
    own = (window - 1, -1) if causal else (window, window)
    mask = vg.buffers.AttentionMask(causal=causal, window=own if slides else (-1, -1))
    got = mask.produce(padded_table(lengths, vg.budgets.Budget.padded(len(lengths), length)), None)
    assert torch.equal(got[:, 0][real], (pattern & keys)[:, 0][real])


@pytest.mark.parametrize("name", ["bert", "modernbert", "clip", "t5"])
def test_whole_models_equal_their_eager_runs(name):
    model = text_model(name)
    check_texts(text_encoder(name, model), model)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_models_with_plain_attention_take_floating_masks(name):
    model = text_model(name, attn_implementation="eager")
    check_texts(text_encoder(name, model, *masks_of(name, dtype=None)), model)


@pytest.mark.parametrize("name", ["modernbert", "clip"])
def test_the_mask_of_another_model_is_refused_and_calls_run_eager(name):
    model = text_model(name)
    encoder = text_encoder(name, model, [vg.buffers.AttentionMask("mask")], declared_by="recipe")
    with pytest.warns(
        UserWarning, match="graphs failed verification .* not used(.|\n)*something other than the module itself"
    ):
        encoder.capture()
    ids, mask = texts([60, 33, 64, 1])
    assert error_of(encoder(ids, attention_mask=mask), model(ids, attention_mask=mask), mask) < 1e-5
    assert encoder.stats.eager == {"its budget failed verification": 1}
    strict = text_encoder(name, model, [vg.buffers.AttentionMask("mask")], verify=vg.options.Verify(strict=True))
    with pytest.raises(vg.errors.VerificationError, match="something other than the module itself"):
        strict(ids, attention_mask=mask)


@pytest.mark.parametrize("name", ["modernbert", "clip"])
def test_a_key_mask_of_four_dimensions_is_refused_too(name):
    def forward(model, input_ids, key_mask):
        return model(input_ids, attention_mask=key_mask[:, None, None])

    encoder = text_encoder(name, text_model(name), [vg.buffers.Mask("key_mask")], forward)
    with pytest.warns(UserWarning, match="failed verification"):
        encoder.capture()


@pytest.mark.parametrize("window", [(7, 8), (8, 7), (9, 9)])
def test_a_window_that_is_off_by_one_is_refused(window):
    masks, forward = masks_of("modernbert")
    wrong = [masks[0], vg.buffers.AttentionMask("sliding", window=window)]
    with pytest.warns(UserWarning, match="failed verification"):
        text_encoder("modernbert", text_model("modernbert"), wrong, forward).capture()


class FarWindow(nn.Module):
    """Makes its mask by itself, with a window wider than most texts are long."""

    def __init__(self):
        super().__init__()
        self.attention = DenseAttention()
        self.eval()

    def forward(self, x, real):
        row = torch.arange(x.shape[1], device=x.device)
        return self.attention(x, real.bool()[:, None, None] & ((row - row[:, None]).abs() <= 500))


@pytest.mark.parametrize("window", [(500, 500), (-1, -1)])
def test_the_proof_sees_windows_wider_than_its_other_items_are_long(window):
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", shape=(8,)), vg.Mask("real"), [vg.buffers.AttentionMask("mask", window=window)]
    )
    budgets = [vg.budgets.Budget.padded(1, 64), vg.budgets.Budget.padded(1, 640)]
    encoder = vg.GraphedEncoder(
        FarWindow(), budgets, spec, forward=lambda module, x, mask: module.attention(x, mask), backend="tape"
    )
    if window == (500, 500):
        encoder.capture()
        x, real = padded_batch([600])
        assert distance(encoder(x, real=real), encoder.module(x, real)) < 1e-5
    else:
        with pytest.warns(UserWarning, match="2 of 2 graphs failed verification"):
            encoder.capture()


@pytest.mark.parametrize("name", ["bert", "modernbert", "clip", "t5"])
def test_a_model_that_looks_at_its_mask_names_the_declaration(name):
    def forward(model, input_ids, attention_mask):
        return model(input_ids, attention_mask=attention_mask)

    with pytest.raises(
        vg.errors.CaptureError, match=re.escape("masking_utils.py") + "(.|\n)*declare it as a vg.buffers.AttentionMask"
    ):
        text_encoder(name, text_model(name), [], forward).capture()


# Packed rows


@pytest.mark.parametrize("dtype", [torch.bool, None])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (3, 5)}])
def test_the_padding_contract_holds_for_packed_rows(dtype, how):
    module = DenseAttention()
    encoder = dense_encoder(module, [vg.buffers.AttentionMask("mask", dtype=dtype, **how)])

    def alone(item):
        row = range(len(item))
        return module(
            item,
            torch.tensor([[sees(q, k, **({"causal": False, "window": (-1, -1)} | how)) for k in row] for q in row]),
        )

    check_padding_contract(encoder, item_by_item(alone), rows_for, "lengths", LAYOUTS, 1e-5)


def test_tensors_beside_packed_rows_hold_no_nan_in_padding_either():
    module = DenseAttention()
    inputs = [vg.inputs.PerRow("beside", (8,)), vg.inputs.PerItem("of_item", (8,), per_row=True)]
    encoder = dense_encoder(module, [vg.buffers.AttentionMask("mask")], inputs=inputs).capture()
    for seed, lengths in enumerate(LAYOUTS):
        x, beside = rows_for(lengths, seed), rows_for(lengths, seed + 100)
        of_item = rows_for([len(lengths)], seed + 200)
        encoder.poison()
        out = encoder(x, lengths=lengths, beside=beside, of_item=of_item)
        expected = item_by_item(module)(x + beside + of_item.repeat_interleave(torch.tensor(lengths), 0), lengths)
        assert distance(out, expected) < 1e-5
        assert equal_bits(out, encoder(x, lengths=torch.tensor(lengths), beside=beside, of_item=of_item))
    assert not encoder.stats.eager


def test_a_model_may_run_packed_rows_as_one_text():
    model = text_model("t5")  # whose bias follows from the distance of rows, so that items keep theirs

    def forward(model, input_ids, mask):
        return model(input_ids[None], attention_mask=mask).last_hidden_state[0]

    spec = vg.BufferSpec(
        vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64), vg.Lengths(), [vg.buffers.AttentionMask("mask")]
    )
    encoder = vg.GraphedEncoder(model, [64, 128], spec, forward=forward, backend="tape")

    def ids_for(lengths, seed):
        return torch.randint(99, (sum(lengths),), generator=torch.Generator().manual_seed(seed))

    alone = item_by_item(lambda ids: model(ids[None]).last_hidden_state[0])
    check_padding_contract(encoder, alone, ids_for, "lengths", LAYOUTS, 1e-5)


def test_without_a_mask_padding_is_left_as_it_is():
    assert dense_encoder(DenseAttention(), [vg.buffers.AttentionMask("mask")]).spec.clears_padding
    assert not dense_encoder(DenseAttention(), [vg.buffers.CuSeqlens("mask")]).spec.clears_padding


# Wrong declarations


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vg.buffers.AttentionMask(window=(3,)), "expected window=(left, right), the numbers of keys before and after"),
        (lambda: vg.buffers.AttentionMask(window=(3, -2)), "expected window=(left, right)"),
        (lambda: vg.buffers.AttentionMask(window=8), "AttentionMask(window=8): expected a tuple with each entry an integer"),
        (lambda: vg.buffers.AttentionMask(dtype=torch.int64), "expected torch.bool, a floating dtype of 16 bits or more, or None"),
        (lambda: vg.buffers.AttentionMask(dtype=torch.float8_e5m2), "expected torch.bool, a floating dtype of 16 bits or more"),
        (
            lambda: vg.BufferSpec("x", vg.Mask(), [vg.buffers.AttentionMask("mask", per="frame")]),
            "rows of a padded batch attend to those of their item; leave per out",
        ),
        (
            lambda: vg.BufferSpec(
                "x", vg.Mask(columns=(vg.layouts.NestedColumn("of"),)), [vg.buffers.AttentionMask("mask", per="group")]
            ),
            "rows of a padded batch attend to those of their item; leave per out",
        ),
    ],
)  # fmt: skip
def test_wrong_declarations_say_what_was_expected(make, message):
    with pytest.raises(vg.errors.SpecError, match=re.escape(message)):
        make()
