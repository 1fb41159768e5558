"""Modules that are hard to copy: by their class, by what they are one with, or by who they are."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import decimal
import functools
import logging
import threading
import types
import weakref

import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.state.base import InCode, Stateful

REGISTRY = weakref.WeakKeyDictionary()
BY_ID = {}
ITSELF = []


class FindsItselfInARegistry(InCode):
    """Copies of it are not found there, and fail."""

    def start(self):
        REGISTRY[self] = 2.0

    def forward(self, x):
        return self.lin(x) * REGISTRY[self]


class FindsItselfByItsId(InCode):
    def start(self):
        BY_ID[id(self)] = 2.0

    def forward(self, x):
        return self.lin(x) * BY_ID.get(id(self), 1.0)


class CountsInARegistry(InCode):
    def start(self):
        REGISTRY[self] = 0

    def forward(self, x):
        REGISTRY[self] += 1
        return self.lin(x) * (1 + 1 / REGISTRY[self])


class KnownToAGlobal(InCode):
    """Whatever runs its forward, itself is what changes."""

    opaque = True

    def start(self):
        ITSELF[:], self.longest = [self], 0

    def forward(self, x):
        ITSELF[0].longest = max(ITSELF[0].longest, len(x))
        return self.lin(x) * (1 + ITSELF[0].longest / 48)


class WeightOfAGlobal(InCode):
    harmless = True

    def start(self):
        ITSELF[:] = [self.lin]

    def forward(self, x):
        return ITSELF[0](x)


class KnowsItself(Stateful):
    def start(self):
        object.__setattr__(self, "me", self)
        self.longest = 0

    def forward(self, x):
        self.me.longest = max(self.longest, len(x))
        return self.lin(x) * (1 + self.longest / 48)


class ForwardOfAnInstance(Stateful):
    def start(self):
        self.longest = 0
        self.forward = types.MethodType(forward_of_an_instance, self)


def forward_of_an_instance(self, x):
    self.longest = max(self.longest, len(x))
    return self.lin(x) * (1 + self.longest / 48)


class CopiesNothing(Stateful, longest=0):
    def __deepcopy__(self, memo):
        raise TypeError("this module is not copied")

    __copy__ = __reduce_ex__ = __getstate__ = __deepcopy__

    def forward(self, x):
        self.longest = max(self.longest, len(x))
        return self.lin(x) * (1 + self.longest / 48)


class IsItsOwnCopy(Stateful, longest=0):
    def __deepcopy__(self, memo):
        return self

    __copy__ = __deepcopy__

    def forward(self, x):
        self.longest = max(self.longest, len(x))
        return self.lin(x) * (1 + self.longest / 48)


class ForgetsItsCacheInCopies(Stateful):
    def start(self):
        self.cache = {}

    def __getstate__(self):
        return {**self.__dict__, "cache": {}}

    def forward(self, x):
        self.cache.setdefault("rows", len(x))
        return self.lin(x) * (1 + self.cache["rows"] / 48)


class IsMadeOfArguments(Stateful):
    """`__new__` wants arguments, and `__init__` may run once."""

    made = 0

    def __new__(cls, dim=None):
        assert dim is None or dim == 8
        return super().__new__(cls)

    def __init__(self, dim=None):
        super().__init__()
        type(self).made += 1
        self.longest = 0

    def forward(self, x):
        self.longest = max(self.longest, len(x))
        return self.lin(x) * (1 + self.longest / 48)


class IsFrozen(Stateful):
    """Attributes cannot be set, once it is made."""

    harmless = True
    frozen = False

    def start(self):
        self.frozen = True

    def __setattr__(self, name, value):
        if self.frozen and name != "training":
            raise AttributeError("this module is frozen")
        super().__setattr__(name, value)

    def forward(self, x):
        return self.lin(x)


class HasSlots(Stateful, longest=0):
    __slots__ = ("longest",)

    def forward(self, x):
        self.longest = max(self.longest, len(x))
        return self.lin(x) * (1 + self.longest / 48)


class IsADict(Stateful, collections.UserDict):
    """Its own entries are state."""

    def __init__(self):
        Stateful.__init__(self)
        self.data = {"longest": 0}

    __hash__ = nn.Module.__hash__
    __eq__ = object.__eq__
    __repr__ = nn.Module.__repr__

    def forward(self, x):
        self["longest"] = max(self["longest"], len(x))
        return self.lin(x) * (1 + self["longest"] / 48)


class IsEmptyAndFalse(Stateful):
    """Its parts are false, and of length 0, as empty containers are."""

    harmless = True

    class Part(nn.Linear):
        def __len__(self):
            return 0

        def __bool__(self):
            return False

    def start(self):
        self.part = self.Part(8, 8)

    def forward(self, x):
        return self.part(self.lin(x))


class EqualParts(Stateful):
    """Its parts are equal and have one hash, and are two."""

    class Part(nn.Linear):
        calls = 0

        def __eq__(self, other):
            return isinstance(other, nn.Linear)

        def __hash__(self):
            return 1

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 1 / self.calls)

    def start(self):
        self.first, self.second = self.Part(8, 8), self.Part(8, 8)

    def forward(self, x):
        return self.first(x) + self.second(x)


class Proxy:
    """Stands for a part, as wrappers do."""

    def __init__(self, part):
        self.__dict__["part"] = part

    def __getattr__(self, name):
        return getattr(self.__dict__["part"], name)

    def __setattr__(self, name, value):
        setattr(self.__dict__["part"], name, value)

    def __call__(self, *args):
        return self.__dict__["part"](*args)

    @property
    def __class__(self):
        return type(self.__dict__["part"])


class ThroughAProxy(Stateful):
    def start(self):
        self.lin.calls = 0
        self.__dict__["proxy"] = Proxy(self.lin)

    def forward(self, x):
        self.proxy.calls += 1
        return self.proxy(x) * (1 + 1 / self.lin.calls)


class WeakProxyOfItsParent(Stateful):
    class Part(nn.Module):
        def forward(self, x):
            self.parent.calls += 1
            return x * (1 + 1 / self.parent.calls)

    def start(self):
        self.calls, self.part = 0, self.Part()
        self.part.__dict__["parent"] = weakref.proxy(self)

    def forward(self, x):
        return self.part(self.lin(x))


class DefaultsOfItself(Stateful):
    def start(self):
        self.calls = 0
        self.counts = collections.defaultdict(lambda: self.calls)

    def forward(self, x):
        self.calls += 1
        return self.lin(x) * (1 + self.counts[len(x) > 48])


class ListWithAttributes(Stateful):
    class Lengths(list):
        longest = 0

    def start(self):
        self.lengths = self.Lengths()

    def forward(self, x):
        self.lengths.longest = max(self.lengths.longest, len(x))
        return self.lin(x) * (1 + self.lengths.longest / 48)


class NumberWithAttributes(Stateful):
    class Number(int):
        longest = 0

    def start(self):
        self.number = self.Number(1)

    def forward(self, x):
        self.number.longest = max(self.number.longest, len(x))
        return self.lin(x) * (self.number + self.number.longest / 48)


class ListThatHoldsItself(Stateful):
    def start(self):
        self.ring = [0]
        self.ring.append(self.ring)

    def forward(self, x):
        self.ring[1][1][0] = max(self.ring[0], len(x))
        return self.lin(x) * (1 + self.ring[0] / 48)


class PartInATuple(Stateful):
    Pair = collections.namedtuple("Pair", ["part", "factor"])

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 1 / self.calls)

    def start(self):
        self.pair = self.Pair(self.Counting(8, 8), 2.0)

    def forward(self, x):
        return self.pair.part(x) * self.pair.factor


class PartInASet(PartInATuple):
    takes = "rows"

    def start(self):
        self.pair = frozenset([self.Counting(8, 8)])

    def forward(self, x):
        return next(iter(self.pair))(x)


class SwapsItsParts(Stateful):
    def start(self):
        self.other = nn.Linear(8, 8)

    def forward(self, x):
        y = self.lin(x)
        self.lin, self.other = self.other, self.lin
        return y


class TurnsToEvaluation(Stateful):
    """Its first call ends its training."""

    in_training = True

    def start(self):
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.norm(self.lin(x))
        self.eval()
        return y


class FreezesItsWeights(Stateful):
    harmless = True

    def forward(self, x):
        self.lin.weight.requires_grad_(False)
        return self.lin(x)


class KeepsWhatCannotBeCopied(Stateful):
    harmless = True

    def start(self):
        self.lock, self.ready = threading.RLock(), threading.Event()
        self.logger, self.factor = logging.getLogger("corpus"), decimal.Decimal("2.0")
        self.stack = contextlib.ExitStack()

    def forward(self, x):
        with self.lock:
            return self.lin(x) * float(self.factor)


class RunsInAPool(Stateful):
    """Its numbers come from another thread."""

    def start(self):
        self.pool, self.longest = concurrent.futures.ThreadPoolExecutor(1), 0

    def forward(self, x):
        self.longest = self.pool.submit(max, self.longest, len(x)).result()
        return self.lin(x) * (1 + self.longest / 48)


class FrozenSlots(Stateful):
    @dataclasses.dataclass(frozen=True, slots=True)
    class State:
        lengths: list

    def start(self):
        self.state = self.State([])

    def forward(self, x):
        self.state.lengths.append(len(x))
        return self.lin(x) * (1 + max(self.state.lengths) / 48)


class CachedByItself(InCode):
    """A cache of the class, whose key is the module: another module has an entry of its own."""

    harmless = True

    @functools.lru_cache  # noqa: B019
    def table(self):
        return self.lin.bias * 2

    def forward(self, x):
        return self.lin(x) + self.table()


class CachedParametrisation(Stateful):
    harmless = True

    class Twice(nn.Module):
        def forward(self, weight):
            return weight * 2

    def start(self):
        parametrize.register_parametrization(self.lin, "weight", self.Twice())

    def forward(self, x):
        with parametrize.cached():
            return self.lin(x) + self.lin(x)


class Scripted(Stateful):
    harmless = True

    def start(self):
        self.part = torch.jit.trace(nn.Linear(8, 8), torch.zeros(2, 8))

    def forward(self, x):
        return self.part(self.lin(x))


class ScriptedCounter(Stateful):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            y = x + self.mean
            self.mean.copy_(x[0])
            return y

    def start(self):
        self.part = torch.jit.trace(self.Part(), torch.zeros(2, 8))
        self.part.mean.zero_()

    def forward(self, x):
        return self.part(self.lin(x))


class FxGraph(Stateful):
    harmless = True

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            y = self.lin(x) + self.steps
            self.steps.add_(1.0)
            return y

    def start(self):
        self.part = torch.fx.symbolic_trace(self.Part())

    def forward(self, x):
        return self.part(x)


class StrangeBuffers(Stateful):
    """Expanded, empty, sparse, complex, of the meta device, and one memory with a weight."""

    harmless = True

    def start(self):
        self.register_buffer("expanded", torch.ones(1).expand(8))
        self.register_buffer("empty", torch.empty(0, 8))
        self.register_buffer("sparse", torch.eye(8).to_sparse())
        self.register_buffer("complex", torch.ones(8, dtype=torch.complex64))
        self.register_buffer("meta", torch.empty(8, device="meta"))
        self.register_buffer("alias", self.lin.weight.data)
        self.register_buffer("nan", torch.full((8,), torch.nan))
        self.loss = float("nan")

    def forward(self, x):
        return self.lin(x) * self.expanded + x @ self.alias


class WritesAWeightThroughABuffer(Stateful):
    def start(self):
        self.register_buffer("alias", self.lin.weight.data)

    def forward(self, x):
        self.alias.mul_(0.9)
        return self.lin(x)


class NumbersThatAreNotThemselves(Stateful):
    """NaN is kept again and again, which changes nothing."""

    harmless = True

    def start(self):
        self.loss, self.history = float("nan"), [float("nan")]

    def forward(self, x):
        self.loss = float("inf") - float("inf")
        self.history[0] = float("inf") - float("inf")
        return self.lin(x)


class SharedPartOfTwoParents(Stateful):
    class Parent(nn.Module):
        def __init__(self, child):
            super().__init__()
            self.child = child

        def forward(self, x):
            y = x + self.child.mean
            self.child.mean.copy_(x[0])
            return y

    def start(self):
        child = nn.Module()
        child.register_buffer("mean", torch.zeros(8))
        self.first, self.second = self.Parent(child), self.Parent(child)

    def forward(self, x):
        return self.second(self.first(self.lin(x)))


class ManyViewsOfOneMemory(Stateful):
    def start(self):
        memory = torch.zeros(4, 8)
        self.views = [memory[at] for at in range(4)]
        self.register_buffer("whole", memory)
        self.by_name = {"last": memory[-1:].squeeze(0)}

    def forward(self, x):
        y = self.lin(x) + self.whole.sum(0)
        self.views[0].copy_(x[0])
        self.by_name["last"].copy_(self.views[0] * 2)
        return y
