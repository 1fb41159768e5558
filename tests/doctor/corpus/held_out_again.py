"""A second list of modules, made like the first after its causes were mended: control flow, rare values, twins."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.doctor.corpus.cases import DIM, Base, case

# Control flow in Python


@case("blocks", "lengths")
class TakesTheExceptPath(Base):
    def start(self):
        self.scales = {1: 1.0, 2: 1.0}

    def forward(self, x, lengths):
        try:
            scale = self.scales[len(lengths)]
        except KeyError:
            x, scale = x * x, 1.0  # site
        return self.proj(x) * scale


@case("blocks", "lengths")
class MatchesTheItems(Base):
    def forward(self, x, lengths):
        match len(lengths):  # site
            case 1 | 3:
                x = -x  # consequence
            case _:
                x = x.abs()  # consequence
        return self.proj(x)


@case("blocks", "lengths")
class LoopsByLogarithm(Base):
    def forward(self, x, lengths):
        items = len(lengths)
        while items > 1:  # site
            x = x.tanh()  # consequence
            items //= 2
        return self.proj(x)


@case("blocks", "lengths")
class RecursByItems(Base):
    def halved(self, x, items):
        if items <= 1:  # site
            return x
        return self.halved(x / 2, items // 2)  # consequence

    def forward(self, x, lengths):
        return self.proj(self.halved(x, len(lengths)))  # consequence


@case("blocks", "lengths")
class ReducesOverARange(Base):
    def forward(self, x, lengths):
        return functools.reduce(lambda y, at: y + torch.sin(at * x), range(len(lengths)), self.proj(x))  # site


@case("blocks", "lengths")
class NamesAFunctionByLayout(Base):
    def forward(self, x, lengths):
        name = "sin" if len(lengths) % 2 else "cos"
        return getattr(torch, name)(self.proj(x))  # site


@case("blocks", "lengths")
class AsksWhetherAnyIsLong(Base):
    def forward(self, x, lengths):
        if any(length > 10 for length in lengths):  # site
            x = x * 2  # consequence
        return self.proj(x)


@case("blocks", "lengths")
class TakesTheLargestInPython(Base):
    def forward(self, x, lengths):
        return self.proj(x) / max(lengths)  # site


@case("blocks", "lengths")
class TakesASquareRootInPython(Base):
    def forward(self, x, lengths):
        return self.proj(x) / math.sqrt(lengths.max())  # site


@case("blocks", "lengths")
class RangesOverATensor(Base):
    def forward(self, x, lengths):
        for _ in range(lengths[0]):  # site
            x = x * 0.9  # consequence
        return self.proj(x)


@case("blocks", "lengths")
class SelectsByATensor(Base):
    def forward(self, x, lengths):
        return self.proj(x) + x[lengths[0] - 1]  # site


@case("blocks", "lengths")
class ChunksByItems(Base):
    def forward(self, x, lengths):
        return torch.cat([part - part.mean(0) for part in self.proj(x).chunk(len(lengths))])  # site


@case("blocks", "lengths")
class PermutesChannelsByItems(Base):
    def forward(self, x, lengths):
        return self.proj(x).roll(len(lengths), dims=1)  # site


@case("blocks", "lengths")
class PicksAPaddingMode(Base):
    def forward(self, x, lengths):
        mode = "reflect" if len(lengths) > 2 else "replicate"
        return F.pad(self.proj(x)[:, None], (1, 1), mode=mode)[:, 0, 2:]  # site


@case("blocks")
class SkipsRowsOfZeros(Base):
    def forward(self, x):
        y = self.proj(x)
        return torch.where((x.abs().sum(1) > 0)[:, None], y, 0) + y[torch.any(x != 0, dim=1)].amax(0)  # site


@case("blocks")
class ScalesTheFirstCalls(Base):
    """Fewer than a capture runs."""

    def start(self):
        self.left = 2

    def forward(self, x):
        if self.left:  # site
            self.left -= 1
            x = x * 2  # consequence
        return self.proj(x)


# Rows that mix, some of them for rare values only


@case("proof")
class HalvesIfAnyIsHuge(Base):
    """Only a value that random rows do not have shows it."""

    def forward(self, x):
        return self.proj(x) * torch.where((x.abs() > 2.5).any(), 0.5, 1.0)


@case("proof")
class ClampsIfAnyIsInfinite(Base):
    def forward(self, x):
        y = self.proj(x)
        limit = torch.where(torch.isinf(x).any(), 0.5, 100.0)
        return torch.minimum(torch.maximum(y, -limit), limit)


@case("proof")
class NormalizesWithoutStatistics(Base):
    def start(self):
        self.norm = nn.BatchNorm1d(DIM, track_running_stats=False)

    def forward(self, x):
        return self.norm(self.proj(x))


@case("proof", "lengths")
class DividesByTheSumInPython(Base):
    def forward(self, x, lengths):
        return self.proj(x) / sum(lengths)


@case("proof", "item")
class LargestOfItems(Base):
    """The item of a padding row is some item."""

    def forward(self, x, item):
        largest = x.new_full((64, DIM), -9.0).index_reduce(0, item, x, "amax")
        return self.proj(x) + largest[item]


@case("proof")
class AttendsCausally(Base):
    def forward(self, x):
        q = x.unflatten(1, (2, 4)).transpose(0, 1)[None]
        return self.proj(F.scaled_dot_product_attention(q, q, q, is_causal=True)[0].transpose(0, 1).flatten(1))


@case("proof")
class QuantizesAllRows(Base):
    def forward(self, x):
        scale = x.abs().amax() / 127
        return self.proj((x / scale).round() * scale)


@case("fine")
class QuantizesRows(Base):
    def forward(self, x):
        scale = x.abs().amax(1, keepdim=True) / 127
        return self.proj((x / scale).round() * scale)


@case("fine", "lengths item")
class AttendsAmongActiveRows(Base):
    def forward(self, x, lengths, item):
        active = torch.arange(len(x), device=x.device) < lengths.sum()
        q = torch.where(active[:, None], x, 0).unflatten(1, (2, 4)).transpose(0, 1)[None]
        mask = (item[:, None] == item) & active
        out = F.scaled_dot_product_attention(q, q, q, mask | ~active[:, None])
        return self.proj(out[0].transpose(0, 1).flatten(1))


@case("fine", "item lengths")
class SortsRowsAndBack(Base):
    def forward(self, x, item, lengths):
        order = lengths[item].argsort(stable=True)
        y = self.proj(x[order])
        return torch.empty_like(y).index_copy(0, order, y)


@case("fine")
class ReturnsATransposedView(Base):
    def forward(self, x):
        return (self.proj.weight @ x.T).T


@case("fine")
class AddsToItsRowsInPlace(Base):
    def forward(self, x):
        return x.add_(1).mul_(2)


@case("fine")
class WeightNormalized(Base):
    def start(self):
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM))

    def forward(self, x):
        return self.layer(x)


@case("fine")
class MixesExpertsOfRows(Base):
    """The best two experts of each row, all of them run."""

    def start(self):
        self.experts = nn.Parameter(torch.randn(4, DIM, DIM))
        self.gate = nn.Linear(DIM, 4)

    def forward(self, x):
        best, at = self.gate(x).topk(2, dim=1)
        weights = torch.zeros(len(x), 4, device=x.device).scatter(1, at, best.softmax(1))
        return torch.einsum("nd,edf,ne->nf", x, self.experts, weights)
