"""Modules with state, chance, threads, hooks and arguments that change, and harmless twins."""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from tests.doctor.corpus.cases import DIM, Base, case

# State


@case("blocks")
class CountsInPython(Base):
    def start(self):
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.proj(x) * self.count  # site


COUNTER = itertools.count(1)


@case("blocks")
class CountsInAGlobal(Base):
    def forward(self, x):
        return self.proj(x) * next(COUNTER)  # site


@case("blocks")
class Alternates(Base):
    def start(self):
        self.even = False

    def forward(self, x):
        self.even = not self.even
        if self.even:  # site
            x = -x  # consequence
        return self.proj(x)


@case("blocks")
class CountsInABuffer(Base):
    def start(self):
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1  # site
        return self.proj(x) * self.steps


@case("blocks")
class ReplacesABuffer(Base):
    def start(self):
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps = self.steps + 1  # site
        return self.proj(x) * self.steps


@case("blocks")
class RunningMean(Base):
    def start(self):
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x):
        self.mean.lerp_(x[0], 0.5)  # site
        return self.proj(x) - self.mean


@case("blocks")
class RunningMeanOfAPlainTensor(Base):
    def start(self):
        self.mean = torch.zeros(DIM)

    def forward(self, x):
        self.mean.lerp_(x[0], 0.5)  # site
        return self.proj(x) - self.mean


@case("blocks")
class DecaysAWeight(Base):
    def forward(self, x):
        self.proj.weight.data.mul_(0.9)  # site
        return self.proj(x)


@case("blocks", training=True)
class BatchNormOfTraining(Base):
    def start(self):
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x):
        return self.norm(self.proj(x))  # site


@case("blocks", training=True)
class SpectralNormOfTraining(Base):
    def start(self):
        self.layer = nn.utils.spectral_norm(nn.Linear(DIM, DIM))

    def forward(self, x):
        return self.layer(x)  # site


@case("blocks")
class RemembersTheLastCall(Base):
    def start(self):
        self.last = torch.zeros(DIM)

    def forward(self, x):
        y = self.proj(x) + self.last  # consequence
        self.last = x[0] * 1  # site
        return y


@case("blocks")
class CollectsCalls(Base):
    def start(self):
        self.seen = []

    def forward(self, x):
        self.seen.append(x[0] * 1)  # consequence
        return self.proj(x) + sum(self.seen)  # site


@case("blocks")
class InitializesABuffer(Base):
    def start(self):
        self.register_buffer("scale", torch.ones(DIM))
        self.ready = False

    def forward(self, x):
        if not self.ready:  # consequence
            self.scale.copy_(x.abs().amax(0))  # site
            self.ready = True
        return self.proj(x) / self.scale


@case("blocks")
class InitializesAnAttribute(Base):
    def start(self):
        self.scale = None

    def forward(self, x):
        if self.scale is None:  # consequence
            self.scale = x.abs().amax(0)  # site
        return self.proj(x) / self.scale


@case("blocks")
class InitializesByABufferFlag(Base):
    """As activation normalisation does it: the flag is a tensor."""

    def start(self):
        self.register_buffer("scale", torch.ones(DIM))
        self.register_buffer("ready", torch.zeros((), dtype=torch.uint8))

    def forward(self, x):
        if self.ready.item() == 0:  # site
            self.scale.copy_(x.abs().amax(0))  # site
            self.ready.fill_(1)  # consequence
        return self.proj(x) / self.scale


@case("fine")
class MakesItsTableOnce(Base):
    """What the first run makes follows from the device and the dtype only."""

    def start(self):
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(DIM, dtype=x.dtype, device=x.device)
        return self.proj(x) + self.table


@case("fine")
class WritesItsArgument(Base):
    def forward(self, x):
        x *= 2
        return self.proj(x) + x


@case("fine")
class WritesWhatItMade(Base):
    def forward(self, x):
        y = torch.zeros_like(x)
        y[:, :4] = x[:, 4:]
        return self.proj(y).mul_(2).add_(x)


@case("fine")
class NotesShapes(Base):
    """Python that no operator reads."""

    def start(self):
        self.calls, self.shapes = 0, set()

    def forward(self, x):
        self.calls += 1
        self.shapes.add(x.shape)
        return self.proj(x)


@case("fine", before=lambda module, at: module.proj.weight.data.mul_(1.0 + 0.1 * (at > 2)))
class LearnsBetweenCalls(Base):
    """Its weights change in place between calls."""

    def forward(self, x):
        return self.proj(x)


# Chance


@case("proof", training=True)
class DropsOut(Base):
    def forward(self, x):
        return F.dropout(self.proj(x), 0.5, self.training)


@case("proof")
class AddsNoise(Base):
    def forward(self, x):
        return self.proj(x) + torch.randn_like(x)


@case("proof")
class DrawsFromASeed(Base):
    """Each run draws the same numbers, each replay new ones."""

    def forward(self, x):
        torch.manual_seed(7)
        return self.proj(x) + torch.rand(DIM, device=x.device)


@case("proof")
class Permutes(Base):
    def forward(self, x):
        return self.proj(x) + x[:, torch.randperm(DIM, device=x.device)]


@case("blocks")
class DrawsFromItsGenerator(Base):
    def start(self):
        self.generator = torch.Generator()

    def __deepcopy__(self, memo):
        return type(self)()

    def forward(self, x):
        return self.proj(x) + torch.rand(DIM, device=x.device, generator=self.generator)  # site


@case("blocks")
class DrawsInPython(Base):
    def forward(self, x):
        return self.proj(x) * random.random()  # site


@case("blocks")
class DrawsInNumpy(Base):
    def forward(self, x):
        return self.proj(x) * float(numpy.random.rand())  # site


@case("blocks")
class DropsALayerInPython(Base):
    def forward(self, x):
        if random.random() < 0.5:  # site
            x = x * 3  # consequence
        return self.proj(x)


@case("blocks")
class ReadsTheClock(Base):
    def forward(self, x):
        return self.proj(x) * (time.perf_counter() % 1)  # site


@case("fine")
class DropsOutInEvaluation(Base):
    def start(self):
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return F.dropout(self.drop(self.proj(x)), 0.1, self.training)


# Threads, hooks, arguments


@case("proof")
class WorksInAThread(Base):
    """What another thread launches is not part of a capture."""

    def forward(self, x):
        made = []
        thread = threading.Thread(target=lambda: made.append(self.proj(x).detach() * 1))
        thread.start()
        thread.join()
        return x + made[0]


@case("proof")
class WorksInAPool(Base):
    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return x + pool.submit(torch.sin, x).result()


@case("blocks")
class CountsInAHook(Base):
    def start(self):
        self.count = 0
        self.proj.register_forward_hook(self.after)

    def after(self, module, args, output):
        self.count += 1
        return output * self.count  # site

    def forward(self, x):
        return self.proj(x)


@case("blocks", "lengths")
class HookOfTheLayout(Base):
    def start(self):
        self.items = 0
        self.proj.register_forward_pre_hook(self.first)

    def first(self, module, args):
        if self.items > 2:  # site
            return (args[0] * 2,)  # consequence
        return None

    def forward(self, x, lengths):
        self.items = len(lengths)
        return self.proj(x)


@case("fine", eager=True)
class ScalesInAHook(Base):
    """Calls with forward hooks run eager."""

    def start(self):
        self.proj.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x):
        return self.proj(x)


@dataclass
class Options:
    """Options of a call that change, and hash by identity."""

    scale: float = 1.0

    __hash__ = object.__hash__


OPTIONS = Options()


def changed(at):
    OPTIONS.scale = 1.0 + at
    return {"options": OPTIONS}


@case("proof", static_args=changed)
class TakesChangingOptions(Base):
    def forward(self, x, options):
        return self.proj(x) * options.scale


@dataclass(frozen=True)
class FrozenOptions:
    """Options of a call that never change."""

    scale: float = 1.0


@case("fine", static_args=lambda at: {"options": replace(FrozenOptions(), scale=1.0 + at % 2)})
class TakesFrozenOptions(Base):
    def forward(self, x, options):
        return self.proj(x) * options.scale


@case("fine", static_args=lambda at: {"scale": 1.0 + at % 2})
class TakesANumber(Base):
    def forward(self, x, scale):
        return self.proj(x) * scale


@case("fine")
class RunsUnderAutocast(Base):
    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.proj(x)
        return y.float() + x
