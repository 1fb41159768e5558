"""Modules of the corpus, each made anew with globals and classes of its own, and plain copies that get the same calls."""

import functools
import random
import types
from pathlib import Path

import numpy
import torch

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.kept import differences
from tests.support.segments import boundaries

FOLDER = Path(__file__).parent / "corpus"


@functools.cache
def code_of(file):
    path = FOLDER / f"{file}.py"
    return compile(path.read_text(), path, "exec")


def load(file):
    """Run a file of the corpus, and return its variables: classes and globals that nothing else shares."""
    namespace = types.ModuleType(f"corpus_{file}")
    exec(code_of(file), vars(namespace))
    return namespace


def names():
    """Return the file and the name of each module of the corpus."""
    for path in sorted(FOLDER.glob("*.py")):
        for name, one in vars(load(path.stem)).items():
            if isinstance(one, type) and vars(one).get("__module__") == f"corpus_{path.stem}" and hasattr(one, "takes"):
                yield path.stem, name


class Copy:
    """A module of the corpus, which nothing else has called.

    Attributes:
        namespace: The variables of its file.
        module: The module.
    """

    def __init__(self, file, name):
        self.namespace = load(file)
        torch.default_generator.manual_seed(0)
        made = getattr(self.namespace, name)
        self.module = made().train(made.in_training)

    @property
    def takes_segments(self):
        """Whether it takes the boundaries of items, beside the rows."""
        return self.module.takes == "segments"

    def __call__(self, x, lengths):
        """Call the module as it is called without this library."""
        return self.module(x, boundaries(lengths), max(lengths)) if self.takes_segments else self.module(x)

    def encoder(self, **options):
        """Return an encoder of the module."""
        buffers = [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()] if self.takes_segments else []
        spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths(), buffers)
        return vg.GraphedEncoder(self.module, [64, 256], spec, **({"backend": "tape"} | options))

    def differences(self, other):
        """Return how what this module keeps differs from what another one keeps."""
        return [] if self.module.opaque else differences(self.module, other.module)

    def differences_of_code(self, other):
        """Return how the classes and globals of this module differ from those of another one."""
        if self.module.opaque or self.module.beyond_reach:
            return []
        return differences(vars(self.namespace), vars(other.namespace), "globals")

    def chances(self, before):
        """Return whether the process's random numbers are others than before."""
        return [] if self.module.beyond_reach or chance() == before else ["random numbers of the process were drawn"]


def call(function, number, lengths):
    """Make the call of this number from the same random numbers; rows repeat after a few calls."""
    random.seed(number), numpy.random.seed(number), torch.default_generator.manual_seed(number)
    return function(rows_for(lengths, number % 5), lengths)


def chance():
    """Return the state of the process's random numbers."""
    states = numpy.random.get_state()[1:3], torch.get_rng_state()
    return random.getstate(), states[0][0].tobytes(), states[0][1], states[1].numpy().tobytes()
