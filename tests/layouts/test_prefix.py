"""`prefix=` of layouts: rows that the module puts before those of each item, as class tokens and registers."""

from itertools import accumulate, chain

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.prefixed import (
    BUDGETS,
    JOINT,
    PARTS,
    PREFIX,
    Joint,
    check_prefix,
    expected,
    images,
    joint_one_by_one,
    prefixed,
)
from tests.support.towers import distance, equal_bits
from varlen_graphs.layouts.item_table import ItemTable


def test_the_padding_contract_holds():
    check_prefix(prefixed(), "cpu", torch.float32, 1e-5)


@settings(max_examples=25)
@given(sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=12))
def test_any_images_give_what_each_gives_alone(sizes):
    x = images(sizes)
    for run in (PREFIXED, PREFIXED.eager):
        assert distance(run(x, sizes=sizes), expected(PREFIXED.module, x, sizes)) < 1e-5


PREFIXED = prefixed()


@pytest.mark.parametrize("layout", [vg.GridTHW("sizes", prefix=PREFIX), vg.Lengths("sizes", prefix=PREFIX)])
def test_other_layouts_have_prefix_rows_too(layout):
    sizes = [(3, 4), (5, 5)]
    x = images(sizes)
    items = [12, 25] if isinstance(layout, vg.Lengths) else [(1, *size) for size in sizes]
    encoder = prefixed(layout)
    assert distance(encoder(x, sizes=items), expected(encoder.module, x, sizes)) < 1e-5


def test_stages_and_layouts_on_the_device_agree():
    sizes = [(3, 4), (1, 2), (6, 6)]
    x = images(sizes)
    out = PREFIXED(x, sizes=sizes)
    with PREFIXED.stage(sizes) as stage:
        stage.rows.copy_(x)
    assert equal_bits(stage.output, out)
    assert equal_bits(PREFIXED(x, sizes=torch.tensor(sizes)), out)
    assert PREFIXED.verify([{"x": x, "sizes": sizes}]).calls == 1


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), prefix=st.integers(1, 4), room=st.integers(0, 9))
def test_the_index_puts_each_row_behind_the_prefix_of_its_item(lengths, prefix, room):
    layout = vg.Lengths(prefix=prefix)
    budget = vg.budgets.Budget(sum(lengths) + room, items=len(lengths) + room // 3)
    values = torch.tensor([[1, 1, length] for length in lengths] + [[0, 0, 0]] * (budget.items - len(lengths)))
    table = ItemTable(values, budget, layout)
    rows = iter(range(sum(lengths)))
    naive = [[*range(budget.rows, budget.rows + prefix), *(next(rows) for _ in range(length))] for length in lengths]
    flat = [*chain.from_iterable(naive)]
    index = vg.buffers.PrefixIndex().produce(table, nn.Identity())
    assert index.shape == (budget.rows + prefix * budget.items,)
    assert index[: len(flat)].tolist() == flat
    assert index.min() >= 0
    assert index.max() < budget.rows + prefix
    own = vg.buffers.PrefixIndex(per_item=True).produce(table, nn.Identity())
    back = vg.buffers.PrefixIndex(inverse=True).produce(table, nn.Identity())
    for item, (start, length) in enumerate(zip(accumulate(map(len, naive), initial=0), map(len, naive), strict=False)):
        assert own[start : start + prefix].tolist() == [
            *range(budget.rows + item * prefix, budget.rows + (item + 1) * prefix)
        ]
        assert own[start + prefix : start + length].tolist() == index[start + prefix : start + length].tolist()
    real = [*range(sum(lengths)), *range(budget.rows, budget.rows + prefix * len(lengths))]
    assert own[back][real].tolist() == real
    assert own.max() < len(own)
    starts = vg.buffers.CuSeqlens().produce(table, nn.Identity()).tolist()
    assert starts[: len(lengths) + 1] == [sum(map(len, naive[:i])) for i in range(len(naive) + 1)]
    assert {*starts[len(lengths) :]} == {len(flat)}


def test_texts_before_images_attend_with_them_as_in_an_mm_dit():
    encoder = vg.GraphedEncoder(Joint(), BUDGETS, JOINT, backend="tape", verify=vg.options.Verify(strict=True))
    for sizes in ([(3, 4), (1, 1), (6, 8)], [(8, 6)], [(2, 2)] * 9):
        x, text = images(sizes), torch.randn(len(sizes), 4, 6)
        encoder(x, sizes=sizes, text=text)
        encoder.poison()
        for run in (encoder, encoder.eager):
            out = run(x, sizes=sizes, text=text)
            assert distance(out, joint_one_by_one(encoder.module, x, sizes, text)) < 1e-5


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), prefix=st.integers(0, 4), room=st.integers(0, 9))
def test_attention_masks_count_prefix_rows(lengths, prefix, room):
    items = torch.tensor([[1, 1, length] for length in lengths])
    whole = [prefix + length for length in lengths]
    table = ItemTable(items, vg.budgets.Budget(sum(lengths) + room, items=len(lengths)), vg.Lengths(prefix=prefix))
    (packed,) = vg.buffers.AttentionMask(causal=True).produce(table, nn.Identity())[0]
    blocks = torch.block_diag(*[torch.ones(rows, rows).tril() for rows in whole]).bool()
    assert packed.shape[0] == table.rows_with_prefix
    assert torch.equal(packed[: len(blocks), : len(blocks)], blocks)
    rest = packed[len(blocks) :]
    assert torch.equal(rest.nonzero()[:, 1] - len(blocks), torch.arange(len(rest)))
    longest = max(lengths) + room
    batch = ItemTable(items, vg.budgets.Budget.padded(len(lengths), longest), vg.Lengths(prefix=prefix, padded=True))
    for own, rows in zip(vg.buffers.AttentionMask().produce(batch, nn.Identity())[:, 0], whole, strict=True):
        expected = torch.eye(prefix + longest).bool()
        expected[:rows, :rows] = True
        assert torch.equal(own, expected)


@pytest.mark.parametrize("per", ["frame", "group", vg.layouts.Windows(2)])
def test_the_item_table_counts_prefix_rows_of_items_only(per):
    table = ItemTable(torch.tensor([[2, 3, 4]]), vg.budgets.Budget(32, items=1, segments=8), vg.GridTHW(prefix=1))
    assert table.cu_seqlens("clip").tolist() == [0] + [25] * 8
    with pytest.raises(vg.errors.SpecError, match="expected 'item', because 'grid_thw' declares prefix rows"):
        table.cu_seqlens(per)


def test_numbers_of_prefix_rows_may_be_those_of_numpy():
    encoder, sizes = prefixed(vg.layouts.GridHW("sizes", prefix=numpy.int64(PREFIX))), [(3, 4), (2, 2)]
    x = images(sizes)
    assert distance(encoder(x, sizes=sizes), expected(encoder.module, x, sizes)) < 1e-5


class Masked(nn.Module):
    """Prefix rows before those of each item of a padded batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.prefix = nn.Parameter(torch.randn(PREFIX, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.eval().requires_grad_(False)

    def forward(self, x, mask):
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)
        return dict.fromkeys(PARTS, self.layer(x, src_key_padding_mask=~mask))


def test_padded_batches_have_prefix_rows_too():
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", (8,)),
        vg.Lengths(prefix=PREFIX, padded=True),
        [vg.buffers.Mask("mask")],
        {part: vg.outputs.Rows(prefix=part) for part in PARTS},
    )
    budgets = [vg.budgets.Budget.padded(2, 16), vg.budgets.Budget.padded(4, 32)]
    encoder = vg.GraphedEncoder(Masked(), budgets, spec, backend="tape", verify=vg.options.Verify(strict=True))
    for lengths in ([5, 16], [1, 30, 7], [32] * 6):
        x = torch.randn(len(lengths), max(lengths), 8)
        encoder(x, lengths=lengths)
        encoder.poison()
        for run in (encoder, encoder.eager):
            out = run(x, lengths=lengths)
            for i, length in enumerate(lengths):
                own = encoder.module(x[i : i + 1, :length], torch.ones(1, PREFIX + length, dtype=torch.bool))["kept"][0]
                assert distance(out["kept"][i, : PREFIX + length], own) < 1e-5
                assert distance(out["dropped"][i, :length], own[PREFIX:]) < 1e-5
                assert distance(out["only"][i], own[:PREFIX]) < 1e-5
                assert not out["kept"][i, PREFIX + length :].any()
        assert out["only"].shape == (len(lengths), PREFIX, 8)
        assert out["dropped"].shape == x.shape


def declared(layout, buffers=(), outputs=None):
    return vg.BufferSpec("x", layout, buffers, outputs or vg.outputs.Rows())


WRONG = {
    "an output with a prefix that the items lack": (
        lambda: declared(vg.Lengths(), outputs=vg.outputs.Rows(prefix="kept")), "declare how many each item has by prefix=",
    ),
    "an index of a prefix that the items lack": (
        lambda: declared(vg.Lengths(), [vg.buffers.PrefixIndex()]), "has no prefix rows: declare how many by prefix=",
    ),
    "an index in a padded batch": (
        lambda: declared(vg.Lengths(prefix=1, padded=True), [vg.buffers.PrefixIndex()]), "is for packed rows",
    ),
    "frames": (
        lambda: declared(vg.GridTHW(prefix=1), [vg.buffers.CuSeqlens(per="frame")]), "expected per='item', because the layout",
    ),
    "windows": (
        lambda: declared(vg.GridTHW(prefix=1), [vg.buffers.CuSeqlens(per=vg.layouts.Windows(2))]), "expected per='item'",
    ),
    "biases": (
        lambda: declared(vg.Lengths(prefix=1), [vg.buffers.RelativePositionBias("b", "b", vg.buffers.T5Buckets())]),
        "prefix rows have no positions",
    ),
    "a ratio": (lambda: vg.outputs.Rows(every=2, prefix="kept"), "expected an entry for each row and prefix row"),
    "another word": (lambda: vg.outputs.Rows(prefix="cls"), "expected 'kept', 'dropped', 'only' or None"),
    "a negative number": (lambda: vg.Lengths(prefix=-1), "expected an integer of at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_declarations_raise_named_errors(case):
    make, message = WRONG[case]
    with pytest.raises(vg.errors.SpecError, match=message):
        make()
