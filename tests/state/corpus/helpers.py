"""Modules that keep something in helpers, functions, hooks and generators of random numbers."""

import copy
import dataclasses
import functools
import queue
import random
import threading
import types
import weakref

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.state.base import InCode, Stateful


class Longest:
    def __init__(self):
        self.rows = 0

    def update(self, x):
        self.rows = max(self.rows, len(x))
        return 1 + self.rows / 48


class KeepsAHelper(Stateful):
    def start(self):
        self.helper = Longest()

    def forward(self, x):
        return self.lin(x) * self.helper.update(x)


class KeepsAHelperThatIsEmpty(Stateful):
    """What it holds before its first call is that of its class."""

    class Longest:
        rows = 0

    def start(self):
        self.helper = self.Longest()

    def forward(self, x):
        self.helper.rows = max(self.helper.rows, len(x))
        return self.lin(x) * (1 + self.helper.rows / 48)


class KeepsSlotsThatAreEmpty(Stateful):
    class Longest:
        __slots__ = ("rows",)

    def start(self):
        self.helper = self.Longest()

    def forward(self, x):
        self.helper.rows = max(getattr(self.helper, "rows", 0), len(x))
        return self.lin(x) * (1 + self.helper.rows / 48)


class KeepsAnEmptyNamespace(Stateful):
    def start(self):
        self.helper = types.SimpleNamespace()

    def forward(self, x):
        self.helper.rows = max(getattr(self.helper, "rows", 0), len(x))
        return self.lin(x) * (1 + self.helper.rows / 48)


class KeepsAHelperOfTensors(Stateful):
    class Mean:
        def __init__(self):
            self.value = torch.zeros(8)

    def start(self):
        self.mean = self.Mean()

    def forward(self, x):
        y = self.lin(x) - self.mean.value
        self.mean.value = x[0] * 1
        return y


class KeepsADataclass(Stateful):
    @dataclasses.dataclass
    class State:
        calls: int = 0
        lengths: list = dataclasses.field(default_factory=list)

    def start(self):
        self.state = self.State()

    def forward(self, x):
        self.state.calls += 1
        self.state.lengths.append(len(x))
        return self.lin(x) * (1 + 1 / self.state.calls)


class KeepsAFrozenDataclass(Stateful):
    @dataclasses.dataclass(frozen=True)
    class State:
        longest: int = 0

    def start(self):
        self.state = self.State()

    def forward(self, x):
        self.state = dataclasses.replace(self.state, longest=max(self.state.longest, len(x)))
        return self.lin(x) * (1 + self.state.longest / 48)


class KeepsSlots(Stateful):
    class State:
        __slots__ = ("calls", "mean")

        def __init__(self):
            self.calls = 0

    def start(self):
        self.state = self.State()

    def forward(self, x):
        y = self.lin(x) + (self.state.mean if self.state.calls else 0)
        self.state.calls += 1
        self.state.mean = x[0] * 1
        return y


class KeepsAHelperWithALock(Stateful):
    class Counter:
        def __init__(self):
            self.lock, self.calls = threading.Lock(), 0

        def step(self):
            with self.lock:
                self.calls += 1
                return self.calls

    def start(self):
        self.counter = self.Counter()

    def forward(self, x):
        return self.lin(x) * (1 + 1 / self.counter.step())


class KeepsAHelperThatRefusesCopies(Stateful):
    opaque = True

    class Counter:
        calls = 0

        def __deepcopy__(self, memo):
            raise TypeError("a counter is not copied")

        __copy__ = __reduce_ex__ = __deepcopy__

    def start(self):
        self.counter = self.Counter()

    def forward(self, x):
        self.counter.calls += 1
        return self.lin(x) * (1 + 1 / self.counter.calls)


class KeepsAQueue(Stateful):
    opaque = True

    def start(self):
        self.queue = queue.SimpleQueue()
        self.queue.put(1.0)

    def forward(self, x):
        factor = self.queue.get()
        self.queue.put(factor * 0.9)
        return self.lin(x) * factor


class KeepsItByThread(Stateful):
    def start(self):
        self.local = threading.local()

    def forward(self, x):
        self.local.longest = max(getattr(self.local, "longest", 0), len(x))
        return self.lin(x) * (1 + self.local.longest / 48)


class CountsInAClosure(Stateful):
    def start(self):
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def forward(self, x):
        return self.lin(x) * (1 + 1 / self.count())


class ListInAClosure(Stateful):
    def start(self):
        lengths = []
        self.longest = lambda x: lengths.append(len(x)) or max(lengths)

    def forward(self, x):
        return self.lin(x) * (1 + self.longest(x) / 48)


class ClosureOverItself(Stateful):
    def start(self):
        self.calls = 0

        def step():
            self.calls += 1
            return 1 + 1 / self.calls

        self.step = step

    def forward(self, x):
        return self.lin(x) * self.step()


class MethodOfItself(Stateful):
    def start(self):
        self.calls = 0
        self.stepping = self.step

    def step(self):
        self.calls += 1
        return 1 + 1 / self.calls

    def forward(self, x):
        return self.lin(x) * self.stepping()


class MethodOfAHelper(Stateful):
    def start(self):
        self.update = Longest().update

    def forward(self, x):
        return self.lin(x) * self.update(x)


class PartialOfAList(Stateful):
    def start(self):
        self.longest = functools.partial(self.update, [])

    @staticmethod
    def update(lengths, x):
        lengths.append(len(x))
        return max(lengths)

    def forward(self, x):
        return self.lin(x) * (1 + self.longest(x) / 48)


class DefaultOfAFunction(Stateful):
    def start(self):
        self.longest = lambda x, lengths=[]: lengths.append(len(x)) or max(lengths)

    def forward(self, x):
        return self.lin(x) * (1 + self.longest(x) / 48)


class AttributeOfAFunction(Stateful):
    def __init__(self):
        super().__init__()

        def step():
            step.calls += 1
            return 1 + 1 / step.calls

        step.calls = 0
        self.step = step

    def forward(self, x):
        return self.lin(x) * self.step()


class CacheOfAnInstance(Stateful):
    opaque = True

    def start(self):
        self.first = functools.lru_cache(lambda: self.rows)

    def forward(self, x):
        self.rows = len(x)
        return self.lin(x) * (1 + self.first() / 48)


class WeakReferenceToAPart(Stateful):
    def start(self):
        self.reference, self.lin.calls = weakref.ref(self.lin), 0

    def forward(self, x):
        self.reference().calls += 1
        return self.lin(x) * (1 + 1 / self.lin.calls)


class WeakDictByPart(Stateful):
    def start(self):
        self.counts = weakref.WeakKeyDictionary({self.lin: 0})

    def forward(self, x):
        self.counts[self.lin] += 1
        return self.lin(x) * (1 + 1 / self.counts[self.lin])


class PartWithItsParent(Stateful):
    class Part(nn.Module):
        def __init__(self, parent):
            super().__init__()
            self.parent = [parent]

        def forward(self, x):
            self.parent[0].calls += 1
            return x * (1 + 1 / self.parent[0].calls)

    def start(self):
        self.calls = 0
        self.part = self.Part(self)

    def forward(self, x):
        return self.part(self.lin(x))


class PartUnderTwoNames(Stateful):
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / self.calls

    def start(self):
        self.first = self.second = self.Counting(8, 8)

    def forward(self, x):
        return self.first(x) + self.second(x)


class ReplacedForward(Stateful):
    """As accelerate replaces forwards."""

    def start(self):
        original, self.lin.calls = self.lin.forward, 0

        def forward(x):
            self.lin.calls += 1
            return original(x) * (1 + 1 / self.lin.calls)

        self.lin.forward = forward

    def forward(self, x):
        return self.lin(x)


class HookThatKeeps(Stateful):
    def start(self):
        self.activations = {}
        self.lin.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.activations["lin"] = output

    def forward(self, x):
        return self.lin(x) * 1


class HookThatCounts(Stateful):
    def start(self):
        calls = []
        self.lin.register_forward_hook(lambda module, args, output: calls.append(1) or output * (1 + 1 / len(calls)))

    def forward(self, x):
        return self.lin(x)


class HookBeforeThatCounts(Stateful):
    def start(self):
        self.longest = 0
        self.lin.register_forward_pre_hook(self.scale)

    def scale(self, module, args):
        self.longest = max(self.longest, len(args[0]))
        return (args[0] * (1 + self.longest / 48),)

    def forward(self, x):
        return self.lin(x)


class HookOfAHelper(Stateful):
    """As accelerate's hooks keep the device of their input."""

    class Hook:
        def __init__(self):
            self.device = self.previous = None

        def __call__(self, module, args, output):
            self.device = args[0].device
            added, self.previous = self.previous, output[0] * 1
            return output if added is None else output + added

    def start(self):
        self.lin.register_forward_hook(self.Hook())

    def forward(self, x):
        return self.lin(x)


class ParametrisationThatCounts(Stateful):
    class Decay(nn.Module):
        calls = 0

        def forward(self, weight):
            self.calls += 1
            return weight * (1 + 1 / self.calls)

    def start(self):
        parametrize.register_parametrization(self.lin, "weight", self.Decay())
        self.lin.parametrizations.weight[0].calls = 0

    def forward(self, x):
        return self.lin(x)


class PythonsOwnGenerator(Stateful):
    def start(self):
        self.random = random.Random(0)

    def forward(self, x):
        return self.lin(x) * self.random.choice([1.0, 2.0, 3.0])


class NumpysOwnGenerator(Stateful):
    def start(self):
        self.random = numpy.random.default_rng(0)

    def forward(self, x):
        return self.lin(x) * float(self.random.integers(1, 4))


class TorchsOwnGenerator(Stateful):
    def start(self):
        self.random = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.lin(x) + torch.randn(8, generator=self.random)


class PythonsChance(InCode):
    def forward(self, x):
        return self.lin(x) * random.choice([1.0, 2.0, 3.0])


class NumpysChance(InCode):
    def forward(self, x):
        return self.lin(x) * numpy.random.randint(1, 4)


class TorchsChance(InCode):
    draws = True

    def forward(self, x):
        return self.lin(x) + torch.randn(8, device=x.device)


class DropoutInTraining(InCode):
    in_training = draws = True

    def start(self):
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.lin(x))


class DropsLayersByChance(InCode):
    in_training = True

    def forward(self, x):
        return self.lin(x) if torch.rand(()) < 0.5 else x


class CopiesItself(Stateful):
    """A target network that follows, as in self-distillation."""

    def start(self):
        self.target = copy.deepcopy(self.lin)

    def forward(self, x):
        y = self.target(x)
        self.target.weight.data.lerp_(self.lin.weight.data * 0.5, 0.5)
        return y
