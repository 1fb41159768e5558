"""Modules whose code keeps something in globals, classes, defaults and caches, which no copy of a module reaches."""

import collections
import contextvars
import functools
import types

import torch

from tests.state.base import InCode

LONGEST = 0
CALLS = [0]
SIGN = [1]
TABLES = {}
MEANS = {}
RECENT = collections.deque(maxlen=2)
SETTINGS = types.SimpleNamespace(longest=0)
SETTINGS_FILE = types.ModuleType("settings_file")
SETTINGS_FILE.longest = 0
IN_CONTEXT = contextvars.ContextVar("longest", default=0)
MEAN = torch.zeros(8)
FIRST = None
SUMS = [0.0]


class GlobalNumber(InCode):
    def forward(self, x):
        global LONGEST
        LONGEST = max(LONGEST, len(x))
        return self.lin(x) * (1 + LONGEST / 48)


class GlobalHiddenByItself(InCode, sign=1):
    """A short call turns the sign of outputs twice: by a global, and by an attribute, of which shadows have their own."""

    def forward(self, x):
        if len(x) < 12:
            SIGN[0] = self.sign = -1
        return self.lin(x) * SIGN[0] * self.sign


class GlobalTables(InCode):
    """What is made for a length is always the same."""

    harmless = True

    def forward(self, x):
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.ones(len(x), 1, device=x.device)
        return self.lin(x) * TABLES[len(x)]


class GlobalMeans(InCode):
    def forward(self, x):
        key = len(x) > 48
        if key not in MEANS:
            MEANS[key] = x[0] * 1
        return self.lin(x) + MEANS[key]


class GlobalWindow(InCode):
    def forward(self, x):
        RECENT.append(len(x))
        return self.lin(x) * (1 + max(RECENT) / 48)


class GlobalNamespace(InCode):
    def forward(self, x):
        SETTINGS.longest = max(SETTINGS.longest, len(x))
        return self.lin(x) * (1 + SETTINGS.longest / 48)


class AnotherFile(InCode):
    def forward(self, x):
        SETTINGS_FILE.longest = max(SETTINGS_FILE.longest, len(x))
        return self.lin(x) * (1 + SETTINGS_FILE.longest / 48)


class ContextVariable(InCode):
    def forward(self, x):
        IN_CONTEXT.set(max(IN_CONTEXT.get(), len(x)))
        return self.lin(x) * (1 + IN_CONTEXT.get() / 48)


class GlobalTensorInPlace(InCode):
    def forward(self, x):
        y = self.lin(x) - MEAN
        MEAN.lerp_(x[0], 0.5)
        return y


class LargestMeansOfTheClass(InCode):
    """Replays write to the tensor that is kept: over NaN it is NaN, which no comparison with a threshold shows."""

    largest = torch.zeros(8)

    def forward(self, x):
        type(self).largest = torch.maximum(self.largest.to(x.device), x.mean(0))
        y = self.lin(x)
        return torch.where(self.largest > 0.5, y, -y)


class AddsToAGlobalInItsFirstCall(InCode, calls=0):
    def forward(self, x):
        before = SUMS[0]
        self.calls += 1
        if self.calls == 1:
            SUMS[0] = SUMS[0] + float(len(x))
        return self.lin(x) + before / 8


class GlobalTensorReplaced(InCode):
    def forward(self, x):
        global FIRST
        if FIRST is None:
            FIRST = x[0] * 1
        return self.lin(x) + FIRST


class ClassAttribute(InCode):
    longest = 0

    def forward(self, x):
        type(self).longest = max(self.longest, len(x))
        return self.lin(x) * (1 + self.longest / 48)


class ContainerOfTheClass(InCode):
    calls = []  # noqa: RUF012

    def forward(self, x):
        self.calls.append(len(x))
        return self.lin(x) * (1 + max(self.calls) / 48)


class DefaultArgument(InCode):
    def forward(self, x, seen=[]):  # noqa: B006
        seen.append(len(x))
        return self.lin(x) * (1 + max(seen) / 48)


class FunctionAttribute(InCode):
    def forward(self, x):
        step.calls += 1
        return self.lin(x) * (1 + 1 / step.calls)


def step():
    """Keeps the calls."""


step.calls = 0


class CachedTables(InCode):
    harmless = True

    def forward(self, x):
        return self.lin(x) * table(len(x))


@functools.lru_cache
def table(rows):
    return torch.ones(rows, 1)


class CachedFirstLength(InCode):
    def forward(self, x):
        CALLS[0] = len(x)
        return self.lin(x) * (1 + first_length() / 48)


@functools.cache
def first_length():
    return CALLS[0]


class CachedMethod(InCode):
    @functools.cache  # noqa: B019
    def scale(self):
        return 1 + self.rows / 48

    def forward(self, x):
        self.rows = len(x)
        return self.lin(x) * self.scale()


class DecoratedForward(InCode):
    @staticmethod
    def counted(forward):
        calls = 0

        @functools.wraps(forward)
        def run(self, x):
            nonlocal calls
            calls += 1
            return forward(self, x) * (1 + 1 / calls)

        return run

    def forward(self, x):
        return self.lin(x)

    forward = counted(forward)


class Metaclass(type):
    longest = 0


class AttributeOfAMetaclass(InCode, metaclass=Metaclass):
    def forward(self, x):
        Metaclass.longest = max(Metaclass.longest, len(x))
        return self.lin(x) * (1 + Metaclass.longest / 48)


class InstancesOfAClass(InCode):
    """A registry: instances share one counter."""

    class Shared:
        calls = 0

    shared = Shared()

    def forward(self, x):
        self.shared.calls += 1
        return self.lin(x) * (1 + 1 / self.shared.calls)
