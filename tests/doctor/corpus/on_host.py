"""Modules that ask the host: values read, host tensors, shapes by data, choices by the layout, and harmless twins."""

import ctypes
import functools
import math

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import varlen_graphs as vg
from tests.doctor.corpus.cases import DIM, Base, case

# Values that Python reads


@case("blocks", "lengths")
class DividesByItem(Base):
    def forward(self, x, lengths):
        return self.proj(x) / lengths.max().item()  # site


@case("blocks", "lengths")
class LoopsOverToList(Base):
    def forward(self, x, lengths):
        parts, start = [], 0
        for n in lengths.tolist():  # site
            parts.append(x[start : start + n] - x[start : start + n].mean(0))  # consequence
            start += n
        return torch.cat(parts)  # consequence


@case("blocks", "lengths")
class SplitsByToList(Base):
    def forward(self, x, lengths):
        parts = x.split(lengths.tolist())  # site
        return torch.cat([part.cumsum(0) for part in parts])  # consequence


@case("blocks", "lengths")
class CastsToInt(Base):
    def forward(self, x, lengths):
        return self.proj(x) * int(lengths[0])  # site


@case("blocks", "lengths")
class CastsToFloat(Base):
    def forward(self, x, lengths):
        return self.proj(x).clamp(max=float(lengths.sum()) / 40)  # site


@case("blocks", "lengths")
class IntInTry(Base):
    """The refusal of a tape or a capture is an exception, too."""

    def forward(self, x, lengths):
        try:
            longest = int(lengths.max())  # site
        except Exception:
            longest = 512
        return self.proj(x) / longest  # consequence


@case("blocks", "lengths")
class BoolInTry(Base):
    def forward(self, x, lengths):
        try:
            long = bool(lengths.max() > 10)  # site
        except RuntimeError:
            long = False
        return self.proj(x) * (2.0 if long else 1.0)  # consequence


@case("blocks", "lengths")
class SlicesByTensor(Base):
    def forward(self, x, lengths):
        return self.proj(x) + x[: lengths[0]].sum(0)  # site


@case("blocks", "lengths")
class ArangeOfTensor(Base):
    def forward(self, x, lengths):
        return self.proj(x) * torch.arange(lengths.max(), device=x.device).sum()  # site


@case("blocks")
class FormatsATensor(Base):
    def forward(self, x):
        self.note = f"{x.sum()}"  # site
        return self.proj(x)


@case("blocks", "lengths")
class LinspaceToTensor(Base):
    def forward(self, x, lengths):
        return self.proj(x) * torch.linspace(0, lengths.max(), DIM, device=x.device)  # site


@case("blocks")
class ToListAndBack(Base):
    def forward(self, x):
        return self.proj(torch.tensor(x.tolist(), device=x.device))  # site


@case("blocks")
class CopiesToTheHost(Base):
    def forward(self, x):
        scale = x.abs().amax().cpu()  # site
        return self.proj(x) / scale  # consequence


@case("blocks")
class CopiesToADeviceObject(Base):
    def forward(self, x):
        scale = x.abs().amax().to(torch.device("cpu"))  # site
        return self.proj(x) / scale  # consequence


@case("blocks")
class Numpy(Base):
    def forward(self, x):
        scale = float(numpy.abs(x.numpy()).max())  # site
        return self.proj(x) / scale  # consequence


@case("blocks")
class NumpyArray(Base):
    def forward(self, x):
        scale = float(numpy.asarray(x).std())  # site
        return self.proj(x) / scale  # consequence


@case("blocks")
class ReadsAnAddress(Base):
    def forward(self, x):
        first = ctypes.c_float.from_address(x.data_ptr()).value  # consequence
        return self.proj(x) * first  # site


@case("fine", "lengths")
class DividesOnTheDevice(Base):
    def forward(self, x, lengths):
        return self.proj(x) / (1 + lengths.sum() * 0)


@case("fine", "lengths item")
class DividesByOwnLength(Base):
    def forward(self, x, lengths, item):
        return self.proj(x) / lengths[item][:, None]


@case("fine")
class ReadsHostNumbers(Base):
    def forward(self, x):
        steps = torch.arange(3).to(torch.device("cpu"))
        return self.proj(x) * steps.sum().item() * steps.tolist()[-1]


# Branches


@case("blocks")
class BranchesOnAny(Base):
    def forward(self, x):
        if (x > 2.5).any():  # site
            x = x * 2  # consequence
        return self.proj(x)


@case("blocks")
class RaisesOnNan(Base):
    def forward(self, x):
        if torch.isnan(x).any():  # site
            raise ValueError("not a number")
        return self.proj(x)


@case("blocks")
class Asserts(Base):
    def forward(self, x):
        assert (x.abs() < 100).all()  # site
        return self.proj(x)


@case("blocks")
class HalvesUntilSmall(Base):
    def forward(self, x):
        y = self.proj(x)
        while y.abs().max() > 1:  # site
            y = y / 2  # consequence
        return y


@case("blocks", "lengths")
class BranchesOnEqual(Base):
    def forward(self, x, lengths):
        if torch.equal(lengths, lengths.sort().values):  # site
            x = -x  # consequence
        return self.proj(x)


@case("blocks", "lengths")
class BranchesOnContains(Base):
    def forward(self, x, lengths):
        if 7 in lengths:  # site
            x = -x  # consequence
        return self.proj(x)


@case("blocks", "lengths")
class CondOnTheDevice(Base):
    def forward(self, x, lengths):
        return torch.cond(lengths.max() > 10, torch.sin, torch.cos, (self.proj(x),))  # site


@case("blocks", "lengths")
class BranchesOnItems(Base):
    def forward(self, x, lengths):
        if len(lengths) > 2:  # site
            x = x * 2  # consequence
        return self.proj(x)


@case("blocks", "lengths")
class BranchesOnThreeItems(Base):
    def forward(self, x, lengths):
        if len(lengths) == 3:  # site
            x = -x  # consequence
        return self.proj(x)


@case("blocks", "lengths")
class ReturnsEarly(Base):
    def forward(self, x, lengths):
        if len(lengths) == 1:  # site
            return x  # consequence
        return self.proj(x)  # consequence


@case("blocks")
class PicksAnExpert(Base):
    def start(self):
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x):
        return self.experts[int(x[0, 0] > 0)](x)  # site


@case("fine")
class SelectsByWhere(Base):
    def forward(self, x):
        return torch.where(x > 0, self.proj(x), x)


@case("fine")
class MixesExpertsDensely(Base):
    def start(self):
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.gate = nn.Linear(DIM, 3)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, at, None] * expert(x) for at, expert in enumerate(self.experts))


@case("fine", "cu_seqlens")
class LoopsOverBoundaries(Base):
    """As many turns as the graph has segments; those of padding begin where no row is."""

    def forward(self, x, cu_seqlens):
        at = torch.arange(len(x), device=x.device)
        start = torch.zeros_like(at)
        for end in cu_seqlens[1:]:
            start = torch.where(at >= end, end, start)
        return self.proj(x) * (at - start)[:, None]


# What the layout chooses in Python


@case("blocks", "lengths")
class OrdersOperands(Base):
    def forward(self, x, lengths):
        a, b = (x, self.proj(x)) if len(lengths) % 2 else (self.proj(x), x)  # consequence
        return a - b  # site


@case("blocks", "lengths")
class OrdersParts(Base):
    def forward(self, x, lengths):
        halves = [x[:, :4], self.proj(x)[:, 4:]]
        if len(lengths) % 2:
            halves.reverse()
        return torch.cat(halves, dim=1)  # site


@case("blocks", "lengths")
class PicksAnOutput(Base):
    def forward(self, x, lengths):
        outputs = self.proj(x), self.proj(-x)  # consequence
        return outputs[len(lengths) % 2]  # site


@case("blocks", "lengths")
class PicksADtype(Base):
    def forward(self, x, lengths):
        dtype = torch.float16 if len(lengths) > 2 else torch.float32
        return self.proj(x).to(dtype).float()  # site


@case("blocks", "lengths")
class PicksAWeight(Base):
    def start(self):
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(float(n))) for n in range(1, 10))

    def forward(self, x, lengths):
        return self.proj(x) * self.scales[len(lengths)]  # site


@case("blocks", "lengths")
class PicksADimension(Base):
    def forward(self, x, lengths):
        return self.proj(x).unflatten(1, (2, 4)).flip(1 + len(lengths) % 2).flatten(1)  # site


@case("blocks", "lengths")
class PicksAFunction(Base):
    def forward(self, x, lengths):
        return (torch.sin, torch.cos)[len(lengths) % 2](self.proj(x))  # site


@case("fine", "lengths")
class PicksByAConstant(Base):
    def start(self):
        self.scales, self.layer = nn.ParameterList(nn.Parameter(torch.tensor(float(n))) for n in range(4)), 2

    def forward(self, x, lengths):
        return (torch.sin, torch.cos)[self.layer % 2](self.proj(x)) * self.scales[self.layer]


# Host tensors


@case("blocks")
class TensorOfNumbers(Base):
    def forward(self, x):
        return self.proj(x) * torch.tensor([1.0, 2.0] * 4, device=x.device)  # site


@case("blocks")
class NewTensor(Base):
    def forward(self, x):
        return self.proj(x) * x.new_tensor([1.0, 2.0] * 4)  # site


@case("blocks")
class AddsAHostTensor(Base):
    def forward(self, x):
        return self.proj(x) + torch.linspace(0, 1, DIM)  # site


@case("blocks")
class IndexesByAHostTensor(Base):
    def forward(self, x):
        return self.proj(x)[torch.arange(len(x))]  # site


@case("blocks")
class MovesAHostTensor(Base):
    def forward(self, x):
        return self.proj(x) + torch.ones(DIM).to(x.device)  # site


@case("blocks", "lengths")
class MovesARangeOfTensors(Base):
    """The numbers of the range are read from the device, and the range is made on the host."""

    def forward(self, x, lengths):
        first = lengths[0]
        steps = torch.arange(first, first + DIM).to(x.device)  # site
        return self.proj(x) * steps


@case("blocks")
class AddsANumpyArray(Base):
    def forward(self, x):
        return self.proj(x) + torch.from_numpy(numpy.ones(DIM, dtype=numpy.float32))  # site


@case("blocks")
class FillsAHostTensor(Base):
    def forward(self, x):
        buffer = torch.empty(DIM)
        buffer[:] = x[0]  # site
        return self.proj(x) + buffer.to(x.device)  # site


@case("fine", "lengths")
class MadeOnTheDeviceOfATensor(Base):
    def forward(self, x, lengths):
        return self.proj(x) + torch.ones(DIM, device=lengths.device) + torch.full((DIM,), 2.0, device=x.device)


@case("fine")
class ReadsABuffer(Base):
    def start(self):
        self.register_buffer("table", torch.linspace(0, 1, DIM))

    def forward(self, x):
        return self.proj(x) + self.table


@case("fine")
class AddsAHostNumber(Base):
    """A host tensor without dimensions is a number to a kernel."""

    def forward(self, x):
        return self.proj(x) * torch.tensor(2.5) + math.pi


# Shapes by data


@case("blocks")
class Nonzero(Base):
    def forward(self, x):
        return self.proj(x) + (x > 0).nonzero().sum()  # site


@case("blocks")
class BooleanMask(Base):
    def forward(self, x):
        return self.proj(x) + x[x > 0].sum()  # site


@case("blocks")
class MaskedSelect(Base):
    def forward(self, x):
        return self.proj(x) + torch.masked_select(x, x > 1).sum()  # site


@case("blocks")
class WhereOfOne(Base):
    def forward(self, x):
        return self.proj(x) + torch.where(x > 1)[0].sum()  # site


@case("blocks", "lengths")
class Unique(Base):
    def forward(self, x, lengths):
        return self.proj(x) * lengths.unique().numel()  # site


@case("blocks", "lengths")
class RepeatsByLengths(Base):
    def forward(self, x, lengths):
        item = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), lengths)  # site
        return self.proj(x) * item[:, None]  # consequence


@case("blocks", "item")
class CountsItems(Base):
    def forward(self, x, item):
        return self.proj(x) / torch.bincount(item)[item][:, None]  # site


@case("blocks", "item")
class OneHotOfAll(Base):
    def forward(self, x, item):
        return self.proj(x) + F.one_hot(item).sum(1)[:, None]  # site


@case("blocks", "lengths")
class SegmentReduce(Base):
    def forward(self, x, lengths):
        return self.proj(x) + torch.segment_reduce(x, "mean", lengths=lengths, axis=0).sum(0)  # site


@case("blocks")
class Histogram(Base):
    def forward(self, x):
        return self.proj(x) + torch.histc(x, bins=DIM)  # site


@case("blocks", "item")
class RoutesRows(Base):
    def forward(self, x, item):
        y = torch.zeros_like(x)
        chosen = (x[:, 0] > 0).nonzero().squeeze(1)  # site
        y[chosen] = self.proj(x[chosen])
        return y


@case("fine")
class FillsByMask(Base):
    def forward(self, x):
        y = self.proj(x)
        y[x > 1] = 0
        return y.masked_fill(x < -1, 1.0)


@case("fine", "lengths")
class RepeatsToASize(Base):
    """Items of padding have no rows, so that the rows of the last one are as many as are left."""

    def forward(self, x, lengths):
        left = torch.cat([lengths, len(x) - lengths.sum()[None]])
        at = torch.arange(len(left), device=x.device)
        item = torch.repeat_interleave(at, left, output_size=len(x))
        return self.proj(x) + torch.cat([lengths, lengths[:1] * 0])[item][:, None]


@case("fine", "item")
class OneHotOfFour(Base):
    def forward(self, x, item):
        return self.proj(x) + F.one_hot(item * 0, 4).float() @ x.new_ones(4, DIM)


# Caches by layout


@case("proof")
class CachesPositionsBySize(Base):
    """The place of a row in the call: it moves where the call is split."""

    @staticmethod
    @functools.lru_cache(maxsize=32)
    def positions(rows, device):
        return torch.arange(rows, dtype=torch.float32, device=device)  # consequence

    def forward(self, x):
        return self.proj(x) + self.positions(len(x), x.device)[:, None]


@case("fine", "cu_seqlens item")
class CachesPlacesBySize(Base):
    """The place of a row in its item, from a table by size. A cache may drop a table, so it may be named, once."""

    @staticmethod
    @functools.lru_cache(maxsize=32)
    def positions(rows, device):
        return torch.arange(rows, dtype=torch.float32, device=device)  # consequence

    def forward(self, x, cu_seqlens, item):
        return self.proj(x) + (self.positions(len(x), x.device) - cu_seqlens[item])[:, None]


@case("blocks", "lengths")
class CachesByLongest(Base):
    def start(self):
        self.tables = {}

    def forward(self, x, lengths):
        longest = int(lengths.max())  # site
        if longest not in self.tables:
            self.tables[longest] = torch.full((DIM,), float(longest), device=x.device)  # consequence
        return self.proj(x) * self.tables[longest]  # consequence


@case("blocks", "lengths")
class GrowsATable(Base):
    def start(self):
        self.table = torch.zeros(0)

    def forward(self, x, lengths):
        if int(lengths.max()) > len(self.table):  # site
            self.table = torch.arange(int(lengths.max()), dtype=torch.float32, device=x.device)  # site
        return self.proj(x) * self.table.sum()  # consequence


@case("fine", "cu_seqlens max_seqlen")
class AttendsInSegments(Base):
    def start(self):
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x, cu_seqlens, max_seqlen):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(1)
        return x + vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)


@case("fine", "lengths max_seqlen")
class AttendsByLengths(Base):
    def start(self):
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x, lengths, max_seqlen):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(1)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
        return x + vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)
