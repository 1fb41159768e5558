"""Padded batches, and encoders that take them: as they are, or packed on their way in."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention

DIM = 8
BUDGETS = (
    *(vg.budgets.Budget.padded(batch, length) for batch in (1, 4) for length in (16, 48)),
    vg.budgets.Budget.padded(8, 16),
)
PACKED_BUDGETS = (vg.budgets.Budget(32, items=4), vg.budgets.Budget(96, items=8))


def padded_batch(lengths, length=None, seed=0, fill=torch.nan, dim=DIM):
    """Return a padded batch with `fill` past the end of each item, and the mask of its real rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), length or max(lengths), dim, generator=generator)
    mask = torch.arange(x.shape[1]) < torch.tensor(lengths)[:, None]
    return x.masked_fill(~mask[..., None], fill), mask


class Transformer(nn.Module):
    """Torch's own encoder: its attention multiplies by what it masks, so that NaN there would reach every row."""

    def __init__(self, dim=DIM, heads=2):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, src_key_padding_mask=None, scale=1.0):
        return scale * self.encoder(x, src_key_padding_mask=src_key_padding_mask)


TRANSFORMER = Transformer().eval()


def one_by_one(x, lengths, module=TRANSFORMER):
    """Return the outputs of a module for each item alone, without padding, in a batch of zeros."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        for i, length in enumerate(lengths):
            out[i, :length] = module(x[i : i + 1, :length])[0]
    return out


class Pooling(nn.Module):
    """Takes lengths, and returns an entry for every row and two for every item."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(DIM, 4)

    def forward(self, x, lengths, real):
        x = self.linear(x) * real[..., None]
        return {"rows": x, "mean": x.sum(1) / lengths.clamp(min=1)[:, None], "longest": lengths[:, None] > 5}


def pooling_encoder(budgets=BUDGETS, **options):
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", shape=(DIM,)),
        vg.Lengths("lengths", padded=True),
        [vg.buffers.Mask("real")],
        vg.outputs.Fields(rows=vg.outputs.Rows(), mean=vg.outputs.Items(), longest=vg.outputs.Items()),
    )
    return vg.GraphedEncoder(Pooling(), budgets, spec, **({"backend": "tape"} | options))


class Packed(Attention):
    """Returns an entry for every row, for every item, and for every two rows of an item."""

    def forward(self, x, cu_seqlens, max_seqlen, first, halves, scale=1.0):
        rows = super().forward(x, cu_seqlens, max_seqlen, scale)
        return {"rows": rows, "positive": rows[:, 0] > 0, "first": rows[first], "halves": rows[halves]}


def halves(table):
    """Return the index of every other row of each item."""
    counts = (table.item_rows + 1) // 2
    ends, entry = counts.cumsum(0), torch.arange(table.budget.rows, device=table.device)
    item = torch.searchsorted(ends, entry, right=True).clamp(max=table.budget.items - 1)
    return (table.item_starts[item] + 2 * (entry - (ends - counts)[item])).clamp(max=table.budget.rows - 1)


def packed_spec(rows=None, layout=None, **changes):
    return vg.BufferSpec(
        rows or vg.inputs.Rows("x", shape=(DIM,), padded_by="mask"),
        layout or vg.Lengths(),
        [
            vg.buffers.CuSeqlens(),
            vg.buffers.MaxSeqlen(),
            vg.buffers.DeviceBuffer("first", lambda table: table.item_starts.clamp(max=table.budget.rows - 1)),
            vg.buffers.DeviceBuffer("halves", halves),
        ],
        changes.pop("outputs", vg.outputs.Fields(
            rows=vg.outputs.Rows(), positive=vg.outputs.Rows(), first=vg.outputs.Items(),
            halves=vg.outputs.Entries(lambda rows: (rows + 1) // 2, lambda budget: budget.rows),
        )),
    )  # fmt: skip


def packed_encoder(module=None, budgets=PACKED_BUDGETS, **options):
    """Return an encoder whose padded batches are packed on their way in."""
    module = Packed().eval() if module is None else module
    return vg.GraphedEncoder(module, budgets, packed_spec(), **({"backend": "tape"} | options))
