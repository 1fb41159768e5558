"""Modules that keep something in containers, arrays and iterators."""

import array
import collections
import ctypes
import io
import itertools
import typing

import numpy
import torch
from torch import nn

from tests.state.base import Stateful


class HistoryOfLengthsOnly(Stateful):
    def start(self):
        self.history = []

    def forward(self, x):
        self.history.append(len(x))
        return self.lin(x)


class HistoryOfLengths(Stateful):
    def start(self):
        self.history = []

    def forward(self, x):
        self.history.append(len(x))
        return self.lin(x) * (1 + max(self.history) / 48)


class HistoryOfRows(Stateful):
    def start(self):
        self.history = []

    def forward(self, x):
        self.history.append(x[0].clone())
        return self.lin(x) + torch.stack(self.history).mean(0)


class HistoryOfOutputsOnly(Stateful):
    def start(self):
        self.history = []

    def forward(self, x):
        y = self.lin(x)
        self.history.append(y)
        return y


class WindowOfLengths(Stateful):
    def start(self):
        self.window = collections.deque([0, 0], maxlen=2)

    def forward(self, x):
        self.window.append(len(x))
        return self.lin(x) * (1 + max(self.window) / 48)


class WindowOfRows(Stateful):
    def start(self):
        self.window = collections.deque(maxlen=2)

    def forward(self, x):
        y = self.lin(x) + sum(self.window)
        self.window.append(x[0] * 1)
        return y


class TablesByLength(Stateful):
    harmless = True

    def start(self):
        self.tables = {}

    def forward(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.ones(len(x), 1, device=x.device)
        return self.lin(x) * self.tables[len(x)]


class TablesByDevice(Stateful):
    harmless = True

    def start(self):
        self.tables = {}

    def forward(self, x):
        table = self.tables.get((x.device, x.dtype))
        if table is None or len(table) < len(x):
            table = torch.ones(2 * len(x), 1, device=x.device, dtype=x.dtype)
            self.tables[x.device, x.dtype] = table
        return self.lin(x) * table[: len(x)]


class RecentTables(Stateful):
    def start(self):
        self.tables = collections.OrderedDict()

    def forward(self, x):
        if len(x) in self.tables:
            self.tables.move_to_end(len(x))
        else:
            self.tables[len(x)] = torch.full((8,), len(self.tables) / 4, device=x.device)
        if len(self.tables) > 2:
            self.tables.popitem(last=False)
        return self.lin(x) + sum(self.tables.values())


class CountsByLength(Stateful):
    def start(self):
        self.counts = collections.defaultdict(int)

    def forward(self, x):
        self.counts[len(x) > 48] += 1
        return self.lin(x) * (1 + self.counts[True] / 4)


class CountsInACounter(Stateful):
    def start(self):
        self.counts = collections.Counter()

    def forward(self, x):
        self.counts.update(calls=1, rows=len(x))
        return self.lin(x) * (1 + self.counts["calls"] / 4)


class SetOfLengths(Stateful):
    def start(self):
        self.seen = set()

    def forward(self, x):
        self.seen.add(len(x))
        return self.lin(x) * len(self.seen)


class DeepInContainers(Stateful):
    def start(self):
        self.state = {"layers": [{"longest": (0, [0])} for _ in range(2)]}

    def forward(self, x):
        kept = self.state["layers"][1]["longest"][1]
        kept[0] = max(kept[0], len(x))
        return self.lin(x) * (1 + kept[0] / 48)


class Statistics(typing.NamedTuple):
    mean: torch.Tensor
    calls: int


class NamedTupleReplaced(Stateful):
    def start(self):
        self.kept = Statistics(torch.zeros(8), 0)

    def forward(self, x):
        y = self.lin(x) + self.kept.mean
        self.kept = Statistics(x[0] * 1, self.kept.calls + 1)
        return y


class NamedTupleInPlace(Stateful):
    def start(self):
        self.kept = Statistics(torch.zeros(8), 0)

    def forward(self, x):
        y = self.lin(x) + self.kept.mean
        self.kept.mean.copy_(x[0])
        return y


class ListOfTensorsInPlace(Stateful):
    def start(self):
        self.means = [torch.zeros(8), torch.zeros(8)]

    def forward(self, x):
        y = self.lin(x) + self.means[0] - self.means[1]
        self.means[1].copy_(self.means[0])
        self.means[0].copy_(x[0])
        return y


class ArrayOfNumpy(Stateful):
    def start(self):
        self.histogram = numpy.zeros(4)

    def forward(self, x):
        self.histogram[min(3, len(x) // 48)] += 1
        return self.lin(x) * (1 + float(self.histogram[0]))


class ArrayOfNumpyWrittenInTheThirdCall(Stateful):
    """Of which only a long third call, or many calls, tell."""

    def start(self):
        self.calls, self.longest = 0, numpy.zeros(1)

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.longest[0] = len(x) / 2
        return self.lin(x) * (2 if self.longest[0] > 40 else 1)


class ArrayOfNumpyAsATensor(Stateful):
    def start(self):
        self.offsets = numpy.zeros(8, dtype=numpy.float32)

    def forward(self, x):
        self.offsets += 0.5
        return self.lin(x) + torch.from_numpy(self.offsets).to(x.device)


class ArrayThatSharesATensor(Stateful):
    def start(self):
        self.offsets = numpy.zeros(8, dtype=numpy.float32)
        self.register_buffer("shared", torch.from_numpy(self.offsets))

    def forward(self, x):
        self.offsets += 0.5
        return self.lin(x) + self.shared


class ArrayOfATensor(Stateful):
    def start(self):
        self.register_buffer("shared", torch.zeros(8))
        self.offsets = self.shared.numpy()[2:6]

    def forward(self, x):
        self.offsets += 0.5
        return self.lin(x) + self.shared


class BytesThatSharesATensor(Stateful):
    def start(self):
        self.numbers = bytearray(8)
        self.register_buffer("shared", torch.frombuffer(self.numbers, dtype=torch.uint8))

    def forward(self, x):
        self.numbers[0] = min(self.numbers[0] + 1, 200)
        return self.lin(x) * self.shared[0]


class WeightOfAnArray(Stateful):
    def start(self):
        self.numbers = numpy.ones(8, dtype=numpy.float32)
        self.scale = nn.Parameter(torch.from_numpy(self.numbers))

    def forward(self, x):
        y = self.lin(x) * self.scale
        self.numbers += 0.5
        return y


class StructureOfC(Stateful):
    def start(self):
        kind = type("Kept", (ctypes.Structure,), {"_fields_": [("rows", ctypes.c_int), ("factor", ctypes.c_float)]})
        self.kept = kind(0, 1.0)

    def forward(self, x):
        self.kept.factor += 0.5
        return self.lin(x) * self.kept.factor


class ArrayOfPython(Stateful):
    def start(self):
        self.numbers = array.array("d", [0.0])

    def forward(self, x):
        self.numbers[0] += 1
        return self.lin(x) * (1 + 1 / self.numbers[0])


class Bytes(Stateful):
    def start(self):
        self.flags = bytearray(2)

    def forward(self, x):
        self.flags[int(len(x) > 48)] = 1
        return self.lin(x) * (1 + sum(self.flags))


class NumberOfC(Stateful):
    def start(self):
        self.longest = ctypes.c_int(0)

    def forward(self, x):
        self.longest.value = max(self.longest.value, len(x))
        return self.lin(x) * (1 + self.longest.value / 48)


class CountsByAnIterator(Stateful):
    def start(self):
        self.numbers = itertools.count(1)

    def forward(self, x):
        return self.lin(x) * (1 + 1 / next(self.numbers))


class CyclesThroughFactors(Stateful):
    def start(self):
        self.factors = itertools.cycle([1.0, 2.0, 3.0])

    def forward(self, x):
        return self.lin(x) * next(self.factors)


class ConsumesAList(Stateful):
    def start(self):
        self.factors = [1.0, 1.0, 2.0, 3.0]

    def forward(self, x):
        return self.lin(x) * (self.factors.pop() if self.factors else 1.0)


class ConsumesAnIterator(Stateful):
    def start(self):
        self.factors = iter([2.0, 3.0])

    def forward(self, x):
        return self.lin(x) * next(self.factors, 1.0)


class CountsByAGenerator(Stateful):
    opaque = True

    def start(self):
        self.numbers = self.count()
        next(self.numbers)

    @staticmethod
    def count():
        calls, factor = 0, 1.0
        while True:
            yield factor
            calls += 1
            factor = 1 + 1 / calls

    def forward(self, x):
        return self.lin(x) * next(self.numbers)


class WritesALog(Stateful):
    def start(self):
        self.log = io.StringIO()

    def forward(self, x):
        self.log.write(f"{len(x)} rows\n")
        return self.lin(x)


class KeepsADictOfItsOwnKind(Stateful):
    class Settings(dict):
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__

    def start(self):
        self.settings = self.Settings(longest=0)

    def forward(self, x):
        self.settings.longest = max(self.settings.longest, len(x))
        return self.lin(x) * (1 + self.settings.longest / 48)


class KeepsAUserDict(Stateful):
    def start(self):
        self.state = collections.UserDict(calls=0)

    def forward(self, x):
        self.state["calls"] += 1
        return self.lin(x) * (1 + 1 / self.state["calls"])


class PartsShareAList(Stateful):
    class Writer(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared = shared

        def forward(self, x):
            self.shared.append(len(x))
            return x

    class Reader(Writer):
        def forward(self, x):
            return x * (1 + max(self.shared) / 48)

    def start(self):
        shared = []
        self.writer, self.reader = self.Writer(shared), self.Reader(shared)

    def forward(self, x):
        return self.reader(self.lin(self.writer(x)))


class PartsInAList(Stateful):
    """Parts that are not registered."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 1 / self.calls)

    def start(self):
        self.layers = [self.Counting(8, 8).requires_grad_(False) for _ in range(2)]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class PartsInADict(Stateful):
    def start(self):
        self.layers = {"norm": (nn.BatchNorm1d(8).requires_grad_(False),)}

    def forward(self, x):
        y = self.lin(x) - self.layers["norm"][0].running_mean
        self.layers["norm"][0](x)
        return y


class DictByPart(Stateful):
    """Its keys are parts."""

    def start(self):
        self.counts = {self.lin: 0}

    def forward(self, x):
        self.counts[self.lin] += 1
        return self.lin(x) * (1 + 1 / self.counts[self.lin])
