"""Outputs whose number of entries an item is no multiple of its rows: sums of every three rows, and of what is left."""

import torch

import varlen_graphs as vg


class Thirds(torch.nn.Module):
    def forward(self, x, entry, entries):
        return x.new_zeros(entries + 1, x.shape[1]).index_add(0, entry, x)[:entries]


def thirds(budget):
    """The most entries that any items have that the budget holds."""
    return (budget.rows + 2 * budget.items) // 3


def entry(table):
    """The entry of each row; that of padding rows is one past the last, which is cut off."""
    counts = (table.item_rows + 2) // 3
    entry = (counts.cumsum(0) - counts)[table.row_item] + table.row_in_item // 3
    return torch.where(table.row_active, entry, thirds(table.budget))


spec = vg.BufferSpec(
    rows="x",
    layout=vg.Lengths("lengths"),
    buffers=[
        vg.buffers.DeviceBuffer("entry", entry),
        vg.buffers.DeviceBuffer("entries", lambda table: thirds(table.budget)),
    ],
    outputs=vg.outputs.Entries(lambda rows: (rows + 2) // 3, thirds),
)

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = vg.GraphedEncoder(Thirds().to(device).eval(), [128], spec, backend="cuda" if device == "cuda" else "tape")
    x = torch.ones(9, 1, device=device)
    out, eager = encoder(x, lengths=[4, 5]), encoder.eager(x, lengths=[4, 5])
    assert out.flatten().tolist() == [3, 1, 3, 2]
    print("largest difference from eager:", (out - eager).abs().max().item())
