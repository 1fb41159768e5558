"""An encoder with an entry for every three rows of an item."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import BUDGETS, rows_for

DIM = 5
ENTRIES = vg.outputs.Entries(lambda rows: -(-rows // 3), lambda budget: (budget.rows + 2 * budget.items) // 3)


class Thirds(nn.Module):
    """The sum of every three rows of an item, fewer at its end, over the longest item of the call."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # tells the device

    def forward(self, x, entry, active, entries, longest):
        x = torch.where(active[:, None], x, 0)
        sums = x.new_zeros(entries, x.shape[1]).index_add(0, entry, x) / longest[0]
        return {"sums": sums, "across": sums.mT, "rows": x}


def entry(table):
    counts = (table.item_rows + 2) // 3
    return (counts.cumsum(0) - counts)[table.row_item] + table.row_in_item // 3


def thirds_encoder(budgets=BUDGETS, entries=ENTRIES, **options):
    across = vg.outputs.Entries(entries.of_item, entries.at_budget, rows_dim=1)
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("x", shape=(DIM,)),
        layout=vg.Lengths(
            columns=(vg.layouts.Column("longest", pad=1, function=lambda call: [max(call.rows)] * len(call)),)
        ),
        buffers=[
            vg.buffers.DeviceBuffer("entry", entry, any_segments=False),
            vg.buffers.DeviceBuffer("active", lambda table: table.row_active, any_segments=False),
            vg.buffers.DeviceBuffer("entries", lambda table: ENTRIES.at_budget(table.budget), any_segments=False),
        ],
        outputs=vg.outputs.Fields(sums=entries, across=across, rows=vg.outputs.Rows()),
    )
    return vg.GraphedEncoder(Thirds(), budgets, spec, **({"backend": "tape"} | options))


def thirds_rows(lengths, seed=0):
    """Return random rows for items of these lengths."""
    return rows_for(lengths, seed, DIM)


def expected_thirds(rows, lengths):
    """Return what the encoder gives, item by item."""
    sums = [third.sum(0) for item in rows.split(list(lengths)) for third in item.split(3)]
    sums = torch.stack(sums) / max(lengths)
    return {"sums": sums, "across": sums.mT, "rows": rows}
