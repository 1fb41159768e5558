"""Points of which the nearest neighbours in the same item are gathered."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.declared.case import Case, alone, graphed

ITEM = vg.buffers.DeviceBuffer("item", lambda table: torch.where(table.row_active, table.row_item, -1))


class Neighbours(nn.Module):
    """The mean of the 8 nearest neighbours among the rows of the same item."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, item):
        far = torch.cdist(x, x).masked_fill(item[:, None] != item, torch.inf)
        nearest = far.topk(8, largest=False)
        return self.linear(torch.where(nearest.values.isinf()[..., None], torch.nan, x[nearest.indices]).mean(1))


def neighbours(device):
    spec = vg.BufferSpec("x", vg.Lengths("lengths"), [ITEM], min_rows=8)
    encoder = graphed(Neighbours(), [64, 128], spec, device)
    calls = [{"x": torch.randn(sum(lengths), 8), "lengths": lengths} for lengths in ([20, 8, 30], [9], [100])]
    return Case(encoder, calls, alone(encoder, "x", ["lengths"]))


POINTS = {"nearest neighbors within an item": neighbours}
