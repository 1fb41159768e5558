"""Modules that refuse most numbers of rows: what they raise is evidence, too."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Of
from tests.support.towers import distance

REFUSED = "its budget failed verification"


def encoder_of(module, budgets=(64, 128), layout=None, **declared):
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), layout or vg.Lengths(), **declared)
    return vg.GraphedEncoder(module.eval(), [*budgets], spec, backend="tape")


class Chunks(nn.Module):
    """Attention among `size` rows each, wherever items begin."""

    def __init__(self, size):
        super().__init__()
        self.linear, self.size = nn.Linear(8, 8), size

    def forward(self, x):
        chunks = self.linear(x).view(-1, self.size, 8)
        return ((chunks @ chunks.mT).softmax(-1) @ chunks).view(-1, 8)


@pytest.mark.filterwarnings("ignore:.*failed verification")
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        *((size, vg.Lengths("sizes")) for size in (2, 4, 8, 16)),
        *((size, vg.layouts.GridHW("sizes")) for size in (2, 8)),
    ],
)
def test_rows_that_are_seen_in_groups_mix_items(size, layout):
    module = Chunks(size)
    encoder = encoder_of(module, (size * 8, size * 32), layout)
    for lengths in ([size - 1, size + 1], [size] * 3, [1] * size, [3 * size, size - 1, 1]):
        rows, sizes = torch.randn(sum(lengths), 8), lengths
        if isinstance(layout, vg.layouts.GridHW):
            sizes = [(1, length) for length in lengths]
        assert distance(encoder(rows, sizes=sizes), module(rows)) < 1e-5
    assert encoder.stats.eager == {REFUSED: 4}


@pytest.mark.filterwarnings("ignore:.*failed verification")
def test_frames_that_are_shifted_across_items_mix_them():
    class Shift(nn.Linear):
        def forward(self, x, side=4):
            frames = super().forward(x).view(-1, side * side, 8)
            return (frames + torch.cat([torch.zeros_like(frames[:1]), frames[:-1]])).view(-1, 8)

    module = Shift(8, 8)
    encoder = encoder_of(module)
    for lengths in ([16, 32], [48], [16] * 9):
        rows = torch.randn(sum(lengths), 8)
        assert distance(encoder(rows, lengths=lengths), module(rows)) < 1e-5
    assert encoder.stats.eager == {REFUSED: 3}


def test_a_module_that_takes_groups_of_rows_of_each_item_is_proven():
    def pairs(module, x, lengths=None):
        return x.view(-1, 2, 8).mean(1)

    spec = vg.BufferSpec("x", vg.Lengths(), outputs=vg.outputs.Rows(every=2))
    encoder = vg.GraphedEncoder(Of(pairs), [64, 128], spec, backend="tape")
    rows = torch.randn(10, 8)
    assert torch.equal(encoder(rows, lengths=[4, 6]), pairs(None, rows))
    assert not encoder.stats.eager


def half(rows):
    return (rows - 1) // 2 + 1


class Conformer(nn.Module):
    """A convolution of stride 2, and attention under a mask of what it makes of each item."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(8, 8, 3, 2, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x, mask):
        return self.layer(self.convolution(x.mT).mT, src_key_padding_mask=mask)


def conformer(of_item):
    return encoder_of(
        Conformer(),
        [vg.budgets.Budget.padded(batch=4, length=64)],
        vg.Lengths("lengths", padded=True),
        buffers=[vg.buffers.Mask("mask", real=False, of_item=of_item)],
        outputs=vg.outputs.Entries(of_item),
    )


@pytest.mark.parametrize(
    "wrong",
    [lambda n: round(n / 2), lambda n: n // 2, lambda n: half(n) - (n % 8 == 5), lambda n: half(n) - (n % 16 == 9)],
)
def test_numbers_of_entries_that_are_wrong_for_some_lengths_end_calls(wrong):
    encoder = conformer(wrong)
    for length in (13, 20):
        with pytest.raises(vg.errors.SpecError, match=r"Declare of_item|Entries"):
            encoder(torch.randn(1, length, 8), lengths=[length])


@pytest.mark.parametrize("positions", [8, 32])
def test_a_module_that_takes_no_longer_items_than_its_budgets_is_proven(positions):
    class Positions(Conformer):
        def __init__(self):
            super().__init__()
            self.positions = nn.Embedding(positions, 8)

        def forward(self, x, mask):
            x = self.convolution(x.mT).mT
            return self.layer(x + self.positions.weight[: x.shape[1]], src_key_padding_mask=mask)

    layout = vg.Lengths("lengths", padded=True)
    buffers = [vg.buffers.Mask("mask", real=False, of_item=half)]
    budgets = [vg.budgets.Budget.padded(batch=4, length=2 * positions)]
    encoder = encoder_of(Positions(), budgets, layout, buffers=buffers, outputs=vg.outputs.Entries(half))
    rows = torch.randn(1, 13, 8)
    expected = encoder.module(rows, torch.zeros(1, 7, dtype=torch.bool))
    assert distance(encoder(rows, lengths=[13]), expected) < 1e-5


def test_numbers_of_entries_that_are_right_are_proven():
    encoder, rows = conformer(half), torch.randn(2, 13, 8)
    rows[1, 9:] = 0
    mask = torch.arange(7) >= torch.tensor([[7], [5]])
    expected = encoder.module(rows, mask) * ~mask[..., None]
    assert distance(encoder(rows, lengths=[13, 9]), expected) < 1e-5
    assert not encoder.stats.eager


@pytest.mark.parametrize("wrong", [lambda n: round(n / 2), lambda n: half(n) - (n == 17)])
def test_numbers_of_packed_entries_that_are_wrong_end_calls(wrong):
    def pooled(module, x, place, entries, lengths=None):
        return x.new_zeros(entries, 8).index_add(0, place, x)

    def place(table):
        entries = (table.item_rows + 1) // 2
        first = entries.cumsum(0) - entries
        return (first[table.row_item] + table.row_in_item // 2).where(table.row_active, most(table.budget) - 1)

    def most(budget):
        return budget.rows // 2 + budget.items + 1

    buffers = [
        vg.buffers.DeviceBuffer("place", place),
        vg.buffers.DeviceBuffer("entries", lambda table: most(table.budget)),
    ]
    right, encoder = (
        encoder_of(Of(pooled), (64, 256), buffers=buffers, outputs=vg.outputs.Entries(count, most))
        for count in (half, wrong)
    )
    rows = torch.randn(22, 8)
    expected = torch.cat([torch.stack([pair.sum(0) for pair in item.split(2)]) for item in rows.split([17, 5])])
    assert distance(right(rows, lengths=[17, 5]), expected) < 1e-5
    with pytest.raises(vg.errors.SpecError, match="alone"):
        encoder(rows, lengths=[17, 5])


@pytest.mark.filterwarnings("ignore:.*failed verification")
@pytest.mark.parametrize("flag", [torch.ones(8, dtype=torch.bool), torch.ones(3, dtype=torch.uint8)])
def test_flags_of_one_byte_make_no_module_a_quantised_one(flag):
    class Leaks(nn.Linear):
        def forward(self, x, row_active):
            return super().forward(x) - 0.02 * (x * row_active[:, None]).sum(0) / row_active.sum()

    module = Leaks(8, 8)
    module.flag = nn.Parameter(flag, requires_grad=False)
    buffers = [vg.buffers.DeviceBuffer("row_active", lambda table: table.row_active)]
    encoder, rows = encoder_of(module, buffers=buffers), torch.randn(9, 8)
    assert distance(encoder(rows, lengths=[4, 5]), module(rows, torch.ones(9))) < 1e-6
    assert encoder.stats.eager == {REFUSED: 1}
