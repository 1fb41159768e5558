"""Modules listed after the doctor was written, before it ran on them: state in odd places, twins, rows that mix."""

import contextlib
import contextvars
import functools
import itertools
import logging
import os
import random
import threading
import weakref
from collections import deque

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.doctor.corpus.cases import DIM, Base, case

# State in odd places


def counter():
    count = 0

    def tick():
        nonlocal count
        count += 1
        return count

    return tick


@case("blocks")
class CountsInAClosure(Base):
    def start(self):
        self.tick = counter()

    def forward(self, x):
        return self.proj(x) * self.tick()  # site


@case("blocks")
class CountsInItsClass(Base):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return self.proj(x) * type(self).calls  # site


def grown(seen=[]):  # noqa: B006
    seen.append(None)
    return len(seen)


@case("blocks")
class CountsInADefaultArgument(Base):
    def forward(self, x):
        return self.proj(x) + grown()  # site


COUNTS = weakref.WeakKeyDictionary()


@case("blocks")
class CountsInAWeakDictionary(Base):
    def forward(self, x):
        COUNTS[self] = COUNTS.get(self, 0) + 1
        return self.proj(x) * COUNTS[self]  # site


@case("blocks")
class CountsInAGenerator(Base):
    def start(self):
        self.steps = (n for n in itertools.count(1))

    def forward(self, x):
        return self.proj(x) * next(self.steps)  # site


LOCAL = threading.local()


@case("blocks")
class CountsInAThreadLocal(Base):
    def forward(self, x):
        LOCAL.count = getattr(LOCAL, "count", 0) + 1
        return self.proj(x) * LOCAL.count  # site


STEP = contextvars.ContextVar("step", default=0)


@case("blocks")
class CountsInAContextVariable(Base):
    def forward(self, x):
        STEP.set(STEP.get() + 1)
        return self.proj(x) * STEP.get()  # site


@case("blocks")
class CountsInTheEnvironment(Base):
    def forward(self, x):
        os.environ["HELD_OUT_COUNT"] = str(int(os.environ.get("HELD_OUT_COUNT", "0")) + 1)
        return self.proj(x) * int(os.environ["HELD_OUT_COUNT"])  # site


@case("blocks")
class CountsInAProperty(Base):
    def start(self):
        self.reads = 0

    @property
    def factor(self):
        self.reads += 1
        return self.reads

    def forward(self, x):
        return self.proj(x) * self.factor  # site


@case("blocks")
class RemembersInADeque(Base):
    """The mean of this call and the one before."""

    def start(self):
        self.history = deque([torch.zeros(DIM)], maxlen=1)

    def forward(self, x):
        y = self.proj(x) + self.history[0]  # consequence
        self.history.append(x[0] * 0.5)  # site
        return y


@case("blocks")
class RemembersInATuple(Base):
    def start(self):
        self.state = (torch.zeros(DIM),)

    def forward(self, x):
        self.state = (self.state[0] * 0.9 + x[0],)  # site
        return self.proj(x) + self.state[0]  # consequence


@case("blocks")
class RegistersABufferInEachCall(Base):
    def start(self):
        self.register_buffer("last", torch.zeros(DIM))

    def forward(self, x):
        y = self.proj(x) + self.last  # consequence
        self.register_buffer("last", x[0] * 1)  # site
        return y


@case("blocks")
class CachesAPropertyOfTheFirstCall(Base):
    def start(self):
        self.x = None

    @functools.cached_property
    def scale(self):
        return self.x.abs().amax(0) + 1  # site

    def forward(self, x):
        self.x = x
        y = self.proj(x) / self.scale
        self.x = None
        return y


@case("blocks")
class ResizesAScratch(Base):
    """Graphs of other budgets would write where the scratch was before."""

    def start(self):
        self.scratch = torch.zeros(0)

    def forward(self, x):
        self.scratch.resize_(x.shape).copy_(x)  # site
        return self.proj(self.scratch)


@case("blocks")
class MakesALayerInEachCall(Base):
    def forward(self, x):
        self.layer = nn.Linear(DIM, DIM)  # consequence
        return self.layer(x)  # site


@case("blocks")
class DrawsFromItsDice(Base):
    def start(self):
        self.dice = random.Random(0)

    def forward(self, x):
        return self.proj(x) * self.dice.random()  # site


@case("blocks")
class DrawsFromAFreshGenerator(Base):
    """The numbers are always the same, and made on the host."""

    def forward(self, x):
        noise = torch.rand(DIM, generator=torch.Generator().manual_seed(3))  # consequence
        return self.proj(x) + noise  # site


@case("proof")
class NumbersSizesAsTheyCome(Base):
    def start(self):
        self.numbers = {}

    def forward(self, x):
        return self.proj(x) * self.numbers.setdefault(len(x), len(self.numbers) + 1)


# Choices by the layout


@functools.cache
def factor_of(items):
    return 1 / (1 + items**2)


@case("blocks", "lengths")
class CachesAFactorByItems(Base):
    def forward(self, x, lengths):
        return self.proj(x) * factor_of(len(lengths))  # site


@case("blocks", "lengths")
class KeysAWeightByAString(Base):
    def start(self):
        self.scales = nn.ParameterDict({f"{n}x{DIM}": nn.Parameter(torch.tensor(float(n))) for n in range(1, 20)})

    def forward(self, x, lengths):
        return self.proj(x) * self.scales[f"{len(lengths)}x{x.shape[1]}"]  # site


@case("blocks", "lengths")
class CallsWithOtherWeights(Base):
    def start(self):
        self.others = nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM)) for _ in range(2))

    def forward(self, x, lengths):
        weights = {"weight": self.others[len(lengths) % 2], "bias": self.proj.bias}
        return torch.func.functional_call(self.proj, weights, (x,))  # site


@case("blocks", "lengths")
class AutocastsByLayout(Base):
    def forward(self, x, lengths):
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=len(lengths) > 2):
            return self.proj(x).float()  # site


@case("blocks", "lengths")
class ParametrizesByLayout(Base):
    """The weight is made from the number of items of the call."""

    class Scaled(nn.Module):
        items = 1

        def forward(self, weight):
            return weight * (1 + 1 / self.items)  # site

    def start(self):
        parametrize.register_parametrization(self.proj, "weight", self.Scaled())

    def forward(self, x, lengths):
        self.proj.parametrizations.weight[0].items = len(lengths)
        return self.proj(x)


@case("blocks", "lengths")
class SlicesChannelsByItems(Base):
    def forward(self, x, lengths):
        y = self.proj(x)
        y[:, : len(lengths) % 3] = 0  # site
        return y


@case("fine", "lengths")
class NotesTheLayoutInAString(Base):
    def forward(self, x, lengths):
        self.note = f"{len(lengths)} items, {tuple(x.shape)}, {x.dtype}"
        logging.getLogger("held_out").debug("rows of %s", x)
        return self.proj(x)


# Values that Python reads


@case("blocks", "lengths")
class SuppressesErrors(Base):
    def forward(self, x, lengths):
        longest = 512
        with contextlib.suppress(Exception):
            longest = lengths.max().item()  # site
        return self.proj(x) / longest  # consequence


@case("blocks")
class RoundTripsThroughNumpy(Base):
    def forward(self, x):
        y = numpy.tanh(self.proj(x).numpy())  # site
        return torch.from_numpy(y) + x  # consequence


@case("blocks")
class ReadsInAnAutogradFunction(Base):
    class Normalize(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x / x.abs().max().item()  # site

        @staticmethod
        def backward(ctx, grad):
            return grad

    def forward(self, x):
        return self.proj(self.Normalize.apply(x))


@case("blocks")
class ReadsUnderACheckpoint(Base):
    def block(self, x):
        if x.abs().max() > 1:  # site
            x = x / 2  # consequence
        return self.proj(x)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)


@case("blocks", "lengths")
class SortsItemsOnTheHost(Base):
    def forward(self, x, lengths):
        order = sorted(range(len(lengths)), key=lengths.tolist().__getitem__)  # site
        parts = x.split(lengths.tolist())  # site
        moved = torch.cat([parts[at] for at in order])  # consequence
        return self.proj(x) + moved.amax(0)


@case("blocks", "item")
class RowsOfTheFirstItem(Base):
    def forward(self, x, item):
        return self.proj(x) - x[item == 0].mean(0)  # site


@case("blocks", "lengths")
class MakesNestedTensors(Base):
    def forward(self, x, lengths):
        nested = torch.nested.as_nested_tensor(list(x.split(lengths.tolist())))  # site
        return self.proj(nested.to_padded_tensor(0.0).amax((0, 1)) + x)  # consequence


@case("blocks", "item")
class SumsBySparseProducts(Base):
    def forward(self, x, item):
        at = torch.stack([item, torch.arange(len(x), device=x.device)])
        sums = torch.sparse_coo_tensor(at, torch.ones_like(x[:, 0]), (64, len(x))) @ x  # site
        return self.proj(x) + sums[item]  # consequence


# Rows that mix, and twins


@case("proof", "lengths item")
class RanksItems(Base):
    def forward(self, x, lengths, item):
        return self.proj(x) + lengths.argsort().argsort()[item][:, None]


@case("proof")
class RoutesByCapacity(Base):
    """As many rows pass as the capacity, a share of all rows, lets through."""

    def forward(self, x):
        chosen = x[:, 0].topk(max(1, len(x) // 2)).indices
        return self.proj(x) + torch.zeros_like(x).index_copy(0, chosen, x[chosen])


@case("proof")
class LooksAtNeighbours(Base):
    def forward(self, x):
        return self.proj(x) + F.pad(x, (0, 0, 1, 1)).unfold(0, 3, 1).amax(-1)


@case("proof")
class VmapsOverAll(Base):
    def forward(self, x):
        return torch.vmap(lambda row: self.proj(row) - x.amax(0))(x)


@case("proof", "cu_seqlens")
class DividesBySumOfRows(Base):
    def forward(self, x, cu_seqlens):
        at = torch.arange(len(x), device=x.device)
        active = torch.where((at < cu_seqlens[-1])[:, None], x, 0)
        return self.proj(x) - active.sum(0) / cu_seqlens[-1]


@case("fine", "cu_seqlens item")
class BagsWithoutAnEnd(Base):
    """The last bag takes all rows that are left, but no item has it: there are more segments than items."""

    def forward(self, x, cu_seqlens, item):
        at = torch.arange(len(x), device=x.device)
        bags = F.embedding_bag(at, x, cu_seqlens[:-1].long(), mode="mean")
        return self.proj(x) - bags[item]


@case("proof")
class MiddleOfRows(Base):
    def forward(self, x):
        return self.proj(x) - x.quantile(0.5, dim=0)


@case("fine", "cu_seqlens item")
class BagsWithAnEnd(Base):
    def forward(self, x, cu_seqlens, item):
        at = torch.arange(len(x), device=x.device)
        bags = F.embedding_bag(at, x, cu_seqlens.long(), mode="mean", include_last_offset=True)
        return self.proj(x) - bags[item]


@case("fine")
class VmapsRows(Base):
    def forward(self, x):
        return torch.vmap(lambda row: self.proj(row) / (1 + row.abs().max()))(x)


@case("fine")
class RotatesInComplex(Base):
    def forward(self, x):
        turned = torch.view_as_complex(self.proj(x).unflatten(1, (-1, 2)))
        angles = torch.arange(DIM // 2, dtype=x.dtype, device=x.device)
        return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(1)


@case("fine", "lengths cu_seqlens")
class SearchesItsItem(Base):
    def forward(self, x, lengths, cu_seqlens):
        at = torch.arange(len(x), dtype=torch.int32, device=x.device)
        item = torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True)
        return self.proj(x) / lengths[item.clamp(max=len(lengths) - 1)].clamp(min=1)[:, None]


@case("fine", "lengths item max_seqlen")
class PadsItemsOnTheDevice(Base):
    def forward(self, x, lengths, item, max_seqlen):
        at = torch.arange(max_seqlen, device=x.device)
        rows = ((lengths.cumsum(0) - lengths)[:, None] + at).clamp(max=len(x) - 1)
        padded = torch.where((at < lengths[:, None])[..., None], x[rows], 0)
        return self.proj(x) - (padded.sum(1) / lengths.clamp(min=1)[:, None])[item]


@case("fine")
class WeightOfAParametrization(Base):
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    def start(self):
        parametrize.register_parametrization(self.proj, "weight", self.Symmetric())

    def forward(self, x):
        return self.proj(x)


@case("fine")
class AutogradFunctionOfRows(Base):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def forward(self, x):
        return self.Double.apply(self.proj(x))
