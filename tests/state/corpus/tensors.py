"""Modules that keep tensors: in buffers, in attributes, and in their weights."""

import torch
from torch import nn

from tests.state.base import Stateful


class CountsInABuffer(Stateful):
    def start(self):
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.lin(x) * (1 + 1 / self.calls)


class CountsInABufferOnly(Stateful):
    def start(self):
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.lin(x)


class CountsRowsInABuffer(Stateful):
    def start(self):
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        y = self.lin(x) * (1 + self.rows / 100)
        self.rows += len(x)
        return y


class CountsRowsInABufferOnly(Stateful):
    def start(self):
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.rows += len(x)
        return self.lin(x)


class LongestInABuffer(Stateful):
    def start(self):
        self.register_buffer("longest", torch.zeros(()))

    def forward(self, x):
        self.longest.clamp_(min=len(x))
        return self.lin(x) * (1 + self.longest / 48)


class LongestItemInABuffer(Stateful):
    """Computed from the boundaries of items, on the device."""

    takes = "segments"

    def start(self):
        self.register_buffer("longest", torch.zeros((), dtype=torch.int32))

    def forward(self, x, cu_seqlens, max_seqlen):
        torch.maximum(self.longest, (cu_seqlens[1:] - cu_seqlens[:-1]).max(), out=self.longest)
        return self.lin(x) * (1 + self.longest / 48)


class MeanOfCallsBefore(Stateful):
    """Updated after its use, so that no row depends on another one of its call."""

    def start(self):
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.lin(x) - self.mean
        self.mean.lerp_(x.mean(0), 0.5)
        return y


class MeanOfCallsBeforeReplaced(Stateful):
    def start(self):
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.lin(x) - self.mean
        self.mean = torch.lerp(self.mean, x.mean(0), 0.5)
        return y


class MeanOfCallsBeforeInAnAttribute(Stateful):
    def start(self):
        self.mean = torch.zeros(8)

    def forward(self, x):
        y = self.lin(x) - self.mean
        self.mean.lerp_(x.mean(0), 0.5)
        return y


class MeanByData(Stateful):
    def start(self):
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.lin(x) - self.mean
        self.mean.data = torch.lerp(self.mean, x.mean(0), 0.5)
        return y


class FirstRowOfTheCallBefore(Stateful):
    """Padding comes after the first row, so a graph can follow it."""

    def start(self):
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x):
        y = self.lin(x) + self.last
        self.last.copy_(x[0])
        return y


class PeakInPlace(Stateful):
    def start(self):
        self.register_buffer("peak", torch.ones(8))

    def forward(self, x):
        y = self.lin(x) / self.peak
        torch.maximum(self.peak, x.abs().amax(0), out=self.peak)
        return y


class BatchNormInTraining(Stateful):
    in_training = True

    def start(self):
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.lin(x))


class BatchNormThatOnlyWatches(Stateful):
    """Its statistics are updated, and rows pass unchanged."""

    in_training = True

    def start(self):
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        self.norm(x)
        return self.lin(x)


class BatchNormOfTheCallBefore(Stateful):
    in_training = True

    def start(self):
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        y = (self.lin(x) - self.norm.running_mean) / self.norm.running_var.sqrt()
        self.norm(x)
        return y


class BatchNormInEvaluation(Stateful):
    harmless = True

    def start(self):
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.lin(x))


class MovingAverageOfWeights(Stateful):
    def start(self):
        self.register_buffer("average", torch.zeros(8, 8))

    def forward(self, x):
        self.average.lerp_(self.lin.weight, 0.25)
        return x @ self.average.T


class MemoryBankByANumber(Stateful):
    def start(self):
        self.register_buffer("bank", torch.zeros(16, 8))
        self.at = 0

    def forward(self, x):
        y = self.lin(x) + self.bank.mean(0)
        self.bank[self.at] = x[0]
        self.at = (self.at + 1) % 16
        return y


class MemoryBankByABuffer(Stateful):
    def start(self):
        self.register_buffer("bank", torch.zeros(16, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        y = self.lin(x) + self.bank.mean(0)
        self.bank.index_copy_(0, self.at, x[:1])
        self.at.add_(1).remainder_(16)
        return y


class QueueOfRows(Stateful):
    """As MoCo's queue: the rows of this call take the places of the oldest ones."""

    def start(self):
        self.register_buffer("queue", torch.zeros(300, 8))

    def forward(self, x):
        y = self.lin(x) + self.queue[:8].mean(0)
        self.queue = torch.cat([x, self.queue])[:300]
        return y


class GrowingTable(Stateful):
    """As tables of rotary embeddings grow: a longer call makes the table anew, and it holds the same."""

    harmless = True

    def start(self):
        self.make(16)

    def make(self, rows):
        self.rows = rows
        self.register_buffer("table", torch.arange(rows)[:, None].mul(0.1).cos().expand(-1, 8), persistent=False)

    def forward(self, x):
        if len(x) > self.rows:
            self.make(len(x))
        return self.lin(x) + self.table[:1]


class GrowingTableOfPlaces(Stateful, table=None):
    """Its rows are those of places in the call."""

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x), device=x.device)[:, None].mul(0.1).cos()
        return self.lin(x) * self.table[: len(x)]


class TableOfTheLongestCall(Stateful, rows=0, table=None):
    """Its entries depend on the length that it was made for."""

    def forward(self, x):
        if len(x) > self.rows:
            self.rows = len(x)
            self.table = torch.linspace(0, self.rows / 48, 8, device=x.device)
        return self.lin(x) + self.table


class CacheOfKeys(Stateful):
    def start(self):
        self.register_buffer("keys", torch.zeros(1, 8))

    def forward(self, x):
        self.keys = torch.cat([self.keys, x[:1]])
        return self.lin(x) + (x @ self.keys.T).softmax(-1) @ self.keys


class CacheOfKeysOfOneSize(Stateful):
    def start(self):
        self.register_buffer("keys", torch.zeros(32, 8), persistent=False)
        self.filled = 0

    def forward(self, x):
        self.keys[self.filled] = x[0]
        self.filled += 1
        own = self.keys[: self.filled]
        return self.lin(x) + (x @ own.T).softmax(-1) @ own


class StateOfARecurrence(Stateful):
    def start(self):
        self.cell, self.state = nn.GRUCell(8, 8), None

    def forward(self, x):
        state = torch.zeros(1, 8, device=x.device) if self.state is None else self.state
        self.state = self.cell(x[:1], state)
        return self.lin(x) + state


class LastOutputKept(Stateful, last=None):
    def forward(self, x):
        self.last = self.lin(x)
        return self.last * 1


class LastOutputReturned(Stateful, last=None):
    """The caller gets the very tensor that it keeps."""

    def forward(self, x):
        self.last = self.lin(x)
        return self.last


class LastInputKept(Stateful, last=None):
    def forward(self, x):
        self.last = x
        return self.lin(x)


class LastInputUsed(Stateful, last=None):
    def forward(self, x):
        y = self.lin(x) if self.last is None else self.lin(x) + self.last[0]
        self.last = x
        return y


class RemembersByIdentity(Stateful):
    """What the same tensor gave is given again."""

    def start(self):
        self.key = self.result = None

    def forward(self, x):
        if self.key is not x:
            self.key, self.result = x, self.lin(x)
        return self.result * 1


class RemembersByAddress(Stateful):
    opaque = True

    def start(self):
        self.results = {}

    def forward(self, x):
        key = x.data_ptr(), x.shape
        if key not in self.results or not torch.equal(self.results[key][0], x):
            self.results[key] = x, self.lin(x)
        return self.results[key][1] * 1


class BufferThatIsAView(Stateful):
    def start(self):
        self.register_buffer("all", torch.zeros(16))
        self.register_buffer("mean", self.all[:8])

    def forward(self, x):
        y = self.lin(x) + self.all[:8]
        self.mean.copy_(x[0])
        return y


class ViewOfAWeight(Stateful):
    """A view of a parameter goes on following it."""

    harmless = True

    def start(self):
        self.row = self.lin.weight.detach()[0]

    def forward(self, x):
        return self.lin(x) + self.row


class BufferThatWasNone(Stateful):
    harmless = True

    def start(self):
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = torch.full((8,), len(x) / 64, device=x.device)
        return self.lin(x) + self.mean


class DecaysItsWeight(Stateful):
    def forward(self, x):
        self.lin.weight.data.mul_(0.9)
        return self.lin(x)


class DecaysItsWeightInPlace(Stateful):
    def forward(self, x):
        self.lin.weight.mul_(0.9)
        return self.lin(x)


class NormalisesItsWeight(Stateful):
    """Once it did, doing it again changes nothing."""

    def forward(self, x):
        weight = self.lin.weight
        weight.data.copy_(weight / weight.norm(dim=1, keepdim=True).clamp(min=1.0))
        return self.lin(x)


class ReplacesItsWeight(Stateful):
    def forward(self, x):
        self.lin.weight = nn.Parameter(self.lin.weight * 0.9, requires_grad=False)
        return self.lin(x)


class PlainWeight(Stateful):
    harmless = True

    def start(self):
        self.weight = torch.randn(8, 8)

    def forward(self, x):
        return self.lin(x) @ self.weight


class SpectralNormInTraining(Stateful):
    in_training = True

    def start(self):
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.layer(x)


class OldSpectralNormInTraining(Stateful):
    in_training = True

    def start(self):
        self.layer = nn.utils.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.layer(x)


class OldSpectralNorm(Stateful):
    def start(self):
        self.layer = nn.utils.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.layer(x)


class WeightNorm(Stateful):
    harmless = True

    def start(self):
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.layer(x)


class TiedWeights(Stateful):
    def start(self):
        self.head = nn.Linear(8, 8)
        self.head.weight = self.lin.weight
        self.register_buffer("bias", torch.zeros(8))
        self.lin.register_buffer("offset", self.bias)

    def forward(self, x):
        y = self.head(self.lin(x)) + self.lin.offset
        self.bias.add_(0.5)
        return y


class Sorted(Stateful):
    """A buffer that is written twice in a call, and read between."""

    harmless = True

    def start(self):
        self.register_buffer("work", torch.zeros(8))

    def forward(self, x):
        self.work.zero_()
        self.work.add_(self.lin.bias)
        return self.lin(x) + self.work
