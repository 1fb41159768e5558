"""Modules that are made ready by their first call, by its values, its size, or not by it at all."""

import functools

import torch
from torch import nn

from tests.state.base import Stateful


class ActNorm(Stateful):
    harmless = True

    def start(self):
        self.register_buffer("mean", torch.zeros(8))
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.mean.copy_(x.mean(0))
            self.ready = True
        return self.lin(x - self.mean)


class ActNormOfWeights(Stateful):
    harmless = True

    def start(self):
        self.scale = nn.Parameter(torch.ones(8))
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.scale.data = 1 / x.std(0, correction=0).clamp(min=0.1)
            self.ready = True
        return self.lin(x * self.scale)


class ActNormByAFlagOfTorch(Stateful):
    def start(self):
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("ready", torch.zeros((), dtype=torch.uint8))

    def forward(self, x):
        if self.ready.item() == 0:
            self.mean.copy_(x.mean(0))
            self.ready.fill_(1)
        return self.lin(x - self.mean)


class ActNormWithoutABranch(Stateful):
    def start(self):
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        self.mean.copy_(torch.where(self.ready, self.mean, x[0]))
        self.ready.fill_(True)
        return self.lin(x - self.mean)


class KeepsTheFirstMean(Stateful, mean=None):
    harmless = True

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0)
        return self.lin(x - self.mean)


class KeepsTheFirstRowAsAView(Stateful, row=None):
    harmless = True

    def forward(self, x):
        if self.row is None:
            self.row = x[0]
        return self.lin(x) + self.row


class KeepsTheFirstLength(Stateful, rows=None):
    harmless = True

    def forward(self, x):
        self.rows = self.rows or len(x)
        return self.lin(x) * (self.rows / 48)


class KeepsTheFirstLongestItem(Stateful, rows=None):
    harmless = True

    takes = "segments"

    def forward(self, x, cu_seqlens, max_seqlen):
        self.rows = self.rows or max_seqlen
        return self.lin(x) * (self.rows / 48)


class InitialisedOnTheThirdCall(Stateful, calls=0, mean=None):
    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.mean = x.mean(0)
        return self.lin(x) if self.mean is None else self.lin(x - self.mean)


class WritesABufferInTheThirdCall(Stateful):
    def start(self):
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.mean.copy_(x.mean(0))
        return self.lin(x - self.mean)


class WritesABufferByDataInTheFourthCall(Stateful):
    def start(self):
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 4:
            self.mean.data += 1
        return self.lin(x - self.mean)


class SumsFromTheFifthCall(Stateful):
    """What runs of padding make NaN compares as nothing does."""

    def start(self):
        self.calls, self.sum = 0, torch.zeros(8)

    def forward(self, x):
        self.calls += 1
        if self.calls >= 5:
            self.sum = self.sum + x.mean(0)
        y = self.lin(x)
        return torch.where(self.sum > 0.5, y, -y)


class WidensInCallsBeyondBudgets(Stateful, wide=False):
    """Such calls run eager: what they change is not as graphs took it."""

    def forward(self, x):
        self.wide = self.wide or len(x) > 256
        return self.lin(x) * (2 if self.wide else 1)


class InitialisedByTheFirstLongCall(Stateful, mean=None):
    def forward(self, x):
        if self.mean is None and len(x) > 100:
            self.mean = x.mean(0)
        return self.lin(x) if self.mean is None else self.lin(x - self.mean)


class InitialisedByTheFirstShortCall(Stateful, mean=None):
    def forward(self, x):
        if self.mean is None and len(x) < 5:
            self.mean = x.mean(0)
        return self.lin(x) if self.mean is None else self.lin(x - self.mean)


class ForgetsAfterAShortCall(Stateful, short=False):
    """The first short call alone has another output."""

    def forward(self, x):
        before, self.short = self.short, self.short or len(x) < 6
        return self.lin(x) if before == self.short else -self.lin(x)


class TablesByLengthFilledAnew(Stateful):
    """The table of a length is made of the rows of its first call."""

    def start(self):
        self.means = {}

    def forward(self, x):
        key = len(x) > 48
        if key not in self.means:
            self.means[key] = x[0] * 1
        return self.lin(x) + self.means[key]


class LazyLinear(Stateful):
    harmless = True

    def start(self):
        self.layer = nn.LazyLinear(8)

    def forward(self, x):
        return self.layer(self.lin(x))


class LazyBatchNorm(Stateful):
    harmless = True

    def start(self):
        self.layer = nn.LazyBatchNorm1d()

    def forward(self, x):
        return self.layer(self.lin(x))


class BuildsALayer(Stateful, layer=None):
    harmless = True

    def forward(self, x):
        if self.layer is None:
            self.layer = nn.Linear(8, 8).requires_grad_(False)
        return self.layer(self.lin(x))


class BuildsALayerBySize(Stateful):
    def start(self):
        self.layers = nn.ModuleDict()

    def forward(self, x):
        key = "short" if len(x) < 48 else "long"
        if key not in self.layers:
            self.layers[key] = nn.Linear(8, 8, bias=False)
            nn.init.constant_(self.layers[key].weight, 0.1 if key == "short" else 0.2)
        return self.layers[key](self.lin(x))


class DrawsAPlainWeight(Stateful, weight=None):
    harmless = True

    def forward(self, x):
        if self.weight is None:
            self.weight = torch.randn(8, 8, device=x.device)
        return self.lin(x) @ self.weight


class RepacksItsWeight(Stateful, packed=None):
    harmless = True

    def forward(self, x):
        if self.packed is None:
            self.packed = self.lin.weight.detach().T.contiguous()
            del self.lin.weight
        return x @ self.packed


class RepacksItsWeightInPlace(Stateful, packed=False):
    """As layers of 4 and 8 bits do it in their first call."""

    harmless = True

    def forward(self, x):
        if not self.packed:
            scale = self.lin.weight.abs().amax()
            self.lin.weight.data = (self.lin.weight / scale * 127).round()
            self.lin.register_buffer("scale", scale / 127)
            self.packed = True
        return x @ self.lin.weight.T * self.lin.scale


class CachedTable(Stateful):
    harmless = True

    @functools.cached_property
    def table(self):
        return torch.arange(8.0).cos()

    def forward(self, x):
        return self.lin(x) + self.table


class CachedTableOfTheFirstCall(Stateful):
    @functools.cached_property
    def table(self):
        return torch.arange(8.0) * self.rows / 64

    def forward(self, x):
        self.rows = len(x)
        return self.lin(x) + self.table


class FusesItsLayers(Stateful):
    harmless = True

    def start(self):
        self.first, self.second, self.fused = nn.Linear(8, 8), nn.Linear(8, 8), None

    def forward(self, x):
        if self.fused is None:
            self.fused = torch.cat([self.first.weight, self.second.weight]).detach()
        return (x @ self.fused.T).unflatten(-1, (2, 8)).sum(-2)


class ReplacesItsForward(Stateful):
    def forward(self, x):
        self.forward = self.later
        return self.lin(x) + 1

    def later(self, x):
        return self.lin(x)


class ReplacesItsClass(Stateful):
    def forward(self, x):
        self.__class__ = Ready
        return self.lin(x) + 1


class Ready(ReplacesItsClass):
    takes = "rows"

    def forward(self, x):
        return self.lin(x)


class RegistersAHook(Stateful, handle=None):
    def forward(self, x):
        if self.handle is None:
            self.handle = self.lin.register_forward_hook(lambda module, args, output: output * 2)
        return self.lin(x)
