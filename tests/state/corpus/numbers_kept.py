"""Modules that keep numbers, flags and texts in attributes."""

import enum

import numpy
import torch

from tests.state.base import Stateful


class LongestSoFar(Stateful, longest=0):
    """As dynamic NTK does it."""

    def forward(self, x):
        self.longest = max(self.longest, len(x))
        return self.lin(x) * (1 + max(0, self.longest - 48) / 48)


class LongestItemSoFar(Stateful, longest=0):
    takes = "segments"

    def forward(self, x, cu_seqlens, max_seqlen):
        self.longest = max(self.longest, max_seqlen)
        return self.lin(x) * (1 + max(0, self.longest - 48) / 48)


class LongestCallScalesFarPositions(Stateful, longest=128):
    """As dynamic NTK: few rows do not show it."""

    takes = "segments"

    def forward(self, x, cu_seqlens, max_seqlen):
        self.longest = max(self.longest, len(x))
        rows = torch.arange(len(x), device=x.device)
        at = rows - cu_seqlens[torch.searchsorted(cu_seqlens, rows, right=True) - 1]
        at = torch.where(at < 48, at, 48 + (at - 48) * 48 / self.longest)
        return self.lin(x) + torch.sin(at / 10)[:, None]


class LongestOnlyKept(Stateful, longest=0):
    def forward(self, x):
        self.longest = max(self.longest, len(x))
        return self.lin(x)


class LongestOfLongOnly(Stateful, longest=48):
    """What it computes changes far beyond the first calls."""

    def forward(self, x):
        if len(x) > self.longest:
            self.longest = len(x)
        return self.lin(x) * (self.longest / 48)


class ResetsWhenShort(Stateful):
    """As transformers' dynamic NTK does it: back to the original table for short inputs."""

    def start(self):
        self.cached, self.original = 48, 48
        self.scale = 1.0

    def forward(self, x):
        if len(x) > self.cached:
            self.cached, self.scale = len(x), len(x) / self.original
        if len(x) < self.original and self.cached > self.original:
            self.cached, self.scale = self.original, 1.0
        return self.lin(x) * self.scale


class CountsCalls(Stateful, calls=0):
    def forward(self, x):
        self.calls += 1
        return self.lin(x) * (1 + 1 / self.calls)


class CountsCallsOnly(Stateful, calls=0):
    def forward(self, x):
        self.calls += 1
        return self.lin(x)


class ChangesAfterManyCalls(Stateful, calls=0):
    """All calls until then are alike."""

    def forward(self, x):
        self.calls += 1
        return self.lin(x) if self.calls < 6 else -self.lin(x)


class SmoothsUpToTheFourthCall(Stateful, calls=0):
    def forward(self, x):
        self.calls += 1
        return self.lin(x) * min(1.0, self.calls / 4)


class IsFirstCall(Stateful, first=True):
    def forward(self, x):
        first, self.first = self.first, False
        return self.lin(x) + 1 if first else self.lin(x)


class Alternates(Stateful, even=False):
    def forward(self, x):
        self.even = not self.even
        return self.lin(x) if self.even else -self.lin(x)


class FactorOfNumpy(Stateful):
    def start(self):
        self.factor = numpy.float64(1.0)

    def forward(self, x):
        self.factor = self.factor * 0.9
        return self.lin(x) * float(self.factor)


class CountsRows(Stateful, rows=0):
    """The next call uses what the calls before had: rows of budgets would be counted."""

    def forward(self, x):
        y = self.lin(x) * (1 + self.rows / 100)
        self.rows += len(x)
        return y


class SetByObject(Stateful, longest=0):
    def forward(self, x):
        object.__setattr__(self, "longest", max(self.longest, len(x)))
        return self.lin(x) * (1 + self.longest / 48)


class SetInTheDict(Stateful, calls=0):
    def forward(self, x):
        self.__dict__["calls"] += 1
        return self.lin(x) * (1 + 1 / self.calls)


class KeepsAMode(Stateful, mode="short"):
    def forward(self, x):
        if len(x) > 48:
            self.mode = "long"
        return self.lin(x) if self.mode == "short" else self.lin(x) + 1


class KeepsAnEnum(Stateful):
    class Phase(enum.Enum):
        NEW = 0
        USED = 1

    def start(self):
        self.phase = self.Phase.NEW

    def forward(self, x):
        y = self.lin(x) + self.phase.value
        self.phase = self.Phase.USED
        return y


class LastThreeLengths(Stateful):
    def start(self):
        self.lengths = ()

    def forward(self, x):
        self.lengths = (*self.lengths[-2:], len(x))
        return self.lin(x) * (1 + max(self.lengths) / 100)


class DeletesAnAttribute(Stateful, fresh=True):
    def forward(self, x):
        if hasattr(self, "fresh"):
            del self.fresh
            return self.lin(x) + 1
        return self.lin(x)


class AddsAnAttribute(Stateful):
    harmless = True

    def forward(self, x):
        if not hasattr(self, "offset"):
            self.offset = len(x) / 64
        return self.lin(x) + self.offset


class ComputesByAProperty(Stateful, _longest=0):
    @property
    def longest(self):
        return self._longest

    @longest.setter
    def longest(self, rows):
        self._longest = max(self._longest, rows)

    def forward(self, x):
        self.longest = len(x)
        return self.lin(x) * (1 + self.longest / 48)


class SetsAttributesItsOwnWay(Stateful):
    """Its attributes lie in a dict of their own."""

    def start(self):
        self.__dict__["own"] = {"longest": 0}

    def __setattr__(self, name, value):
        if name == "longest":
            self.own["longest"] = value
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name):
        return self.__dict__["own"][name] if name == "longest" else super().__getattr__(name)

    def forward(self, x):
        self.longest = max(self.longest, len(x))
        return self.lin(x) * (1 + self.longest / 48)


class ReadsTheLargestValue(Stateful, largest=0.0):
    """A host read of values: no graph can hold it."""

    def forward(self, x):
        self.largest = max(self.largest, x.abs().max().item())
        return self.lin(x) / self.largest


class KeepsADtype(Stateful, seen=None):
    def forward(self, x):
        new, self.seen = self.seen != x.dtype, x.dtype
        return self.lin(x) * (2 if new else 1)


class KeepsASize(Stateful, size=None):
    """Work that is redone where the size of the input changes, as attention masks are in many towers."""

    harmless = True

    def forward(self, x):
        if self.size != x.shape:
            self.size = x.shape
            self.places = torch.arange(len(x), device=x.device).sin()[:, None] * 0
        return self.lin(x) + self.places
