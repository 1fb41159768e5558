"""`outputs.Entries` of padded batches: rows become fewer or more in convolutions, pooling and upsampling."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.padded import padded_batch
from tests.support.shrinking import (
    BUDGETS,
    DIM,
    POOLED,
    SUBSAMPLING,
    WAVEFORM,
    Pooled,
    Subsampling,
    Waveform,
    check_subsampling,
    frames,
    half,
    quarter,
    shrinking,
    subsampled,
)
from tests.support.towers import distance


def test_the_padding_contract_holds_behind_a_convolutional_front_end():
    check_subsampling(shrinking(Subsampling(), SUBSAMPLING), "cpu", torch.float32, 1e-5)


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=9), more=st.integers(0, 20))
def test_any_lengths_give_what_the_module_gives_for_each_item_alone(lengths, more):
    x, expected = subsampled(lengths)
    longer = torch.cat([x, torch.full((len(lengths), more, DIM), torch.nan)], 1)
    for run in (SUBSAMPLED, SUBSAMPLED.eager):
        out = run(longer, lengths=lengths)
        assert out.shape[1] == half(half(longer.shape[1]))
        assert distance(out[:, : expected.shape[1]], expected) < 1e-5
        assert not out[:, expected.shape[1] :].any()


SUBSAMPLED = shrinking(Subsampling(), SUBSAMPLING)


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(11, 64), min_size=1, max_size=6))
def test_frames_of_waveforms(lengths):
    x = torch.randn(len(lengths), max(lengths))
    out = WAVEFORMS(x, lengths=lengths)
    assert out.shape == (len(lengths), frames(max(lengths)), DIM)
    for own, rows, length in zip(out, x, lengths, strict=True):
        assert distance(own[: frames(length)], WAVEFORMS.module(rows[None, :length])[0]) < 1e-5
        assert not own[frames(length) :].any()


WAVEFORMS = shrinking(Waveform(), WAVEFORM)


def test_items_too_short_for_a_frame_have_none():
    x = torch.randn(2, 30)
    out = WAVEFORMS(x, lengths=[3, 30])
    assert not out[0].any()
    assert distance(out[1:], WAVEFORMS.module(x[1:])) < 1e-5


def far(rows):
    """Frames of a waveform behind a kernel of 250 samples and a stride of 40."""
    return (rows - 250) // 40 + 1


@pytest.mark.parametrize("mixes", [False, True])
def test_front_ends_that_need_hundreds_of_samples_are_captured_and_proven(mixes):
    class Front(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv1d(1, DIM, 250, 40)

        def forward(self, x):
            frames = self.conv(x[:, None]).mT
            return frames - frames.mean(1, keepdim=True) if mixes else frames

    spec = vg.BufferSpec(vg.inputs.Rows("x", ()), vg.Lengths(padded=True), outputs=vg.outputs.Entries(far))
    budgets = [vg.budgets.Budget.padded(2, 1000), vg.budgets.Budget.padded(4, 2000)]
    module = Front().eval().requires_grad_(False)
    encoder = vg.GraphedEncoder(module, budgets, spec, backend="tape", verify=vg.options.Verify(strict=True))
    if mixes:
        with pytest.raises(vg.errors.VerificationError, match="Front"):
            encoder.capture()
        return
    x = torch.randn(3, 1900)
    for lengths in ([1900, 249, 700], [250, 1, 40]):
        out = encoder(x, lengths=lengths)
        for own, rows, length in zip(out, x, lengths, strict=True):
            if length >= 250:
                assert distance(own[: far(length)], module(rows[None, :length])[0]) < 1e-5
            assert not own[max(0, far(length)) :].any()
    assert not encoder.stats.eager


def test_ratios_and_growth():
    encoder = shrinking(Pooled(), POOLED)
    x, mask = padded_batch([10, 4, 22], fill=7)
    x *= mask[..., None]
    for out in (encoder(x, lengths=[10, 4, 22]), encoder.eager(x, lengths=[10, 4, 22])):
        assert distance(out, encoder.module(x)) == 0
    uneven = torch.zeros(2, 13, DIM)
    for lengths, message in {
        (12, 5): r"lengths\[1\] has 5 rows: expected a multiple of 2, .*; pad the item, or declare Entries",
        (12, 6): "x is padded to 13 rows: expected a multiple of 2, .*; pad the batch, or declare Entries",
    }.items():
        with pytest.raises(vg.errors.LayoutError, match=message):
            encoder(uneven, lengths=[*lengths])
    assert [budget.max_seqlen for budget in shrinking_at(vg.budgets.Budget.padded(2, 31)).budgets] == [32]


def shrinking_at(budget):
    return vg.GraphedEncoder(Pooled(), [budget], POOLED, backend="tape")


def test_a_ratio_of_a_batch_that_is_packed():
    class Halved(torch.nn.Module):
        def forward(self, x):
            return x.unflatten(0, (-1, 2)).sum(1)

    spec = vg.BufferSpec(vg.inputs.Rows("x", (DIM,), padded_by="mask"), vg.Lengths(), outputs=vg.outputs.Rows(every=2))
    encoder = vg.GraphedEncoder(Halved(), [64], spec, backend="tape", verify=vg.options.Verify(strict=True))
    x, mask = padded_batch([10, 4, 20])
    expected = (x.nan_to_num() * mask[..., None]).unflatten(1, (-1, 2)).sum(2)
    for run in (encoder, encoder.eager):
        assert distance(run(x, lengths=[10, 4, 20], mask=mask), expected) == 0
    encoder.verify([{"x": x, "lengths": [10, 4, 20], "mask": mask}])


def test_a_front_end_that_mixes_in_padding_is_refused():
    encoder = shrinking(Subsampling(masked=False), SUBSAMPLING)
    with pytest.raises(vg.errors.VerificationError, match="Subsampling"):
        encoder.capture()


def test_attention_masks_of_what_rows_become():
    class Dense(Subsampling):
        def forward(self, x, half_mask, mask):
            x = self.second(self.first(x.mT).relu() * half_mask[:, None]).mT.relu()
            q, k, v = (
                self.layer.self_attn.in_proj_weight.mul(1)[None]
                .expand(len(x), -1, -1)
                .matmul(x.mT)
                .mT[:, None]
                .chunk(3, -1)
            )
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)[:, 0]

    masks = [vg.buffers.Mask("half_mask", of_item=half), vg.buffers.AttentionMask("mask", of_item=quarter)]
    spec = vg.BufferSpec(vg.inputs.Rows("x", (DIM,)), vg.Lengths(padded=True), masks, vg.outputs.Entries(quarter))
    encoder = shrinking(Dense().eval(), spec)
    x, lengths = torch.randn(3, 64, DIM), [64, 21, 7]
    out = encoder(x, lengths=lengths)
    for own, rows, length in zip(out, x, lengths, strict=True):
        masks = [
            torch.ones(1, *size, dtype=torch.bool) for size in ((half(length),), (1, quarter(length), quarter(length)))
        ]
        assert distance(own[: quarter(length)], encoder.module(rows[None, :length], *masks)[0]) < 1e-5


class Halved(torch.nn.Module):
    """Every second row."""

    def forward(self, x):
        return x[:, ::2]


HALVED = vg.BufferSpec(vg.inputs.Rows("x", (DIM,)), vg.Lengths(padded=True), outputs=vg.outputs.Rows(every=2))


def test_counts_stay_those_that_graphs_have_read():
    stride = [2]
    encoder = batches(vg.outputs.Entries(lambda rows: -(-rows // stride[0])))
    x = torch.randn(2, 30, DIM)
    first = encoder(x, lengths=[30, 9])
    stride[0] = 4
    for run in (encoder, encoder.eager):
        assert torch.equal(run(x, lengths=[30, 9]), first)


@pytest.mark.parametrize(("module", "spec"), [(Subsampling(), SUBSAMPLING), (Halved(), HALVED)])
def test_declarations_that_were_used_can_be_pickled(module, spec):
    x = torch.randn(2, 30, DIM)
    first = shrinking(module, spec)(x, lengths=[30, 8])
    again = shrinking(module, pickle.loads(pickle.dumps(spec)))
    assert torch.equal(again(x, lengths=[30, 8]), first)


def test_graphs_know_the_owner_of_the_counts(recwarn):
    encoder = shrinking(Subsampling(), SUBSAMPLING)
    x, _ = subsampled([20, 30])
    encoder(x, lengths=[20, 30])
    assert not [warning for warning in recwarn if "owns" in str(warning.message)]


@pytest.mark.parametrize(
    "wrong", [lambda rows: half(rows) // 2, lambda rows: rows // 4, lambda rows: (rows + 1) // 4, lambda rows: rows]
)
def test_a_mask_that_counts_otherwise_than_the_module_is_refused(wrong):
    buffers = [vg.buffers.Mask("half_mask", of_item=half), vg.buffers.Mask("mask", of_item=wrong)]
    spec = vg.BufferSpec(SUBSAMPLING.rows, SUBSAMPLING.layout, buffers, SUBSAMPLING.outputs)
    encoder = vg.GraphedEncoder(Subsampling(), BUDGETS, spec, backend="tape", verify=vg.options.Verify(strict=True))
    with pytest.raises((vg.errors.SpecError, RuntimeError), match=r"of_item|shape|size"):
        encoder.capture()


def test_results_that_are_split_and_verified():
    encoder = shrinking(Subsampling(), SUBSAMPLING)
    lengths = [64, 3, 60, 7, 33, 12, 9, 50, 2]
    x, expected = subsampled(lengths)
    assert distance(encoder(x, lengths=lengths), expected) < 1e-5
    assert encoder.stats.replays.total() > 1
    assert encoder.verify([{"x": x, "lengths": lengths}]).calls == 1


def batches(outputs, layout=None, buffers=()):
    spec = vg.BufferSpec(vg.inputs.Rows("x", (DIM,)), layout or vg.Lengths(padded=True), buffers, outputs)
    return vg.GraphedEncoder(
        torch.nn.Linear(1, 1), [vg.budgets.Budget.padded(2, 32)], spec, forward=strided, backend="tape"
    )


def strided(module, x, **_):
    return x[:, ::2]


WRONG = {
    "as many entries as rows": (
        lambda: batches(vg.outputs.Rows()).capture(), vg.errors.SpecError,
        r"an output of shape \[1, 16, 8\] is declared as .*: expected \[1, 32, ...\] .*; declare it as "
        r"Items\(\), Rows\(every=2\), or Entries\(of_item\) with a function of the rows that gives 16 for 32",
    ),
    "another function": (
        lambda: batches(vg.outputs.Entries(lambda rows: rows // 4)).capture(), vg.errors.SpecError,
        r"expected \[1, 8, ...\] .*Entries\(of_item\) with a function of the rows that gives 16 for 32",
    ),
    "a function of no integers": (
        lambda: batches(vg.outputs.Entries(lambda rows: rows / 2)).capture(), vg.errors.SpecError,
        r"of_item\(1\) returned 0.5: expected an integer",
    ),
    "a function that decreases": (
        lambda: batches(vg.outputs.Entries(lambda rows: rows // 2 if rows != 9 else 2)).capture(), vg.errors.SpecError,
        r"of_item\(8\) is 4, but of_item\(9\) is 2: expected no fewer entries for more rows",
    ),
    "a function of some numbers only": (
        lambda: batches(vg.outputs.Entries([half(rows) for rows in range(33)].__getitem__)).capture(), vg.errors.SpecError,
        r"of_item\(33\) raised IndexError: .*; expected an integer for any number of rows: .* up to twice the length",
    ),
    "a function of no integers for packed rows": (
        lambda: vg.outputs.Entries(lambda rows: rows / 2, lambda budget: budget.rows).count((1, 1, 4)), vg.errors.SpecError,
        r"of_item\(4\) returned 2.0: expected an integer",
    ),
    "packed rows": (
        lambda: batches(vg.outputs.Entries(half), vg.Lengths()), vg.errors.SpecError,
        "expected at_budget for packed rows",
    ),
    "another dimension": (
        lambda: batches(vg.outputs.Entries(half, rows_dim=1)), vg.errors.SpecError,
        r"a padded batch is \[batch, length, ...\]; leave rows_dim out",
    ),
    "a budget below the shortest item": (
        lambda: vg.GraphedEncoder(Waveform(), [vg.budgets.Budget.padded(2, 10)], WAVEFORM, backend="tape"),
        vg.errors.BudgetError, r"an item of fewer than 11 rows has no entry in some output; .* vg.budgets.PaddedLadder\(min_length=11\)",
    ),
    "a mask of packed rows": (
        lambda: batches(vg.outputs.Rows(), vg.Lengths(), [vg.buffers.AttentionMask(of_item=half)]), vg.errors.SpecError,
        "is for packed rows: leave of_item out, or declare a padded batch",
    ),
    "no function": (
        lambda: batches(vg.outputs.Rows(), buffers=[vg.buffers.Mask(of_item=2)]), vg.errors.SpecError,
        r"Mask\(of_item=2\): expected a function or None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_declarations_raise_errors_that_name_the_right_one(case):
    make, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        make()
