"""Comparing what two modules keep: attributes, buffers, containers, helpers, closures and generators, recursively."""

import collections
import contextvars
import copy
import ctypes
import functools
import io
import itertools
import random
import sys
import threading
import types
import weakref
from concurrent.futures import Executor

import numpy
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type(...), range, slice)
SKIPPED = (types.ModuleType, type, RemovableHandle, torch.jit.ScriptModule, threading.Thread, Executor)
"""What is not looked into: it is counted for all of the process, or not in Python."""

LOCKS = (type(threading.Lock()), type(threading.RLock()))
OF_CLASSES = ("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__slots__", "__annotations__")
OF_CLASSES += ("__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl")
OF_CLASSES += ("__slotnames__",)  # which copyreg keeps there


def differences(got, expected, name="module"):
    """Return in what two objects that were made alike differ by now, a line each.

    Classes, functions and Python modules that both share are equal, whatever they hold. What is one object in one place
    must be one object in the other.
    """
    comparison = Comparison()
    comparison.compare(got, expected, name)
    return comparison.found


class Comparison:
    """A walk over two objects at once.

    Attributes:
        found: Differences so far.
    """

    def __init__(self):
        self.found = []
        self.met, self.partners, self.alive = set(), {}, []

    def compare(self, got, expected, name):
        if got is expected:
            return
        if name_of(type(got)) != name_of(type(expected)):
            self.found.append(f"{name} is a {name_of(type(got))}, not a {name_of(type(expected))}")
            return
        if isinstance(got, PLAIN):
            if got != expected and not (got != got and expected != expected):
                self.found.append(f"{name} is {got!r}, not {expected!r}")
            return
        if (id(got), id(expected)) in self.met:
            return
        self.met.add((id(got), id(expected)))
        self.alive += got, expected
        if self.partners.setdefault(id(got), id(expected)) != id(expected):
            self.found.append(f"{name} is one object with another, which it should not be")
        if self.partners.setdefault(("expected", id(expected)), id(got)) != id(got):
            self.found.append(f"{name} is not one object with another, as it should be")
        before = len(self.found)
        for kind, compare in KINDS:
            if isinstance(got, kind):
                compare(self, got, expected, name)
                break
        if len(self.found) == before:
            self.compare_attributes(got, expected, name)

    def compare_attributes(self, got, expected, name):
        if isinstance(got, SKIPPED) or name_of(type(got)).startswith("varlen_graphs."):
            return
        own, others = attributes(got), attributes(expected)
        if own.keys() != others.keys():
            self.found.append(f"{name} has {only(own, others)}, and has not {only(others, own)}")
        for key in own.keys() & others.keys():
            self.compare(own[key], others[key], f"{name}.{key}")

    def tensors(self, got, expected, name):
        if nn.parameter.is_lazy(got):
            return
        forms = [(one.shape, one.dtype, one.device, one.requires_grad) for one in (got, expected)]
        if forms[0] != forms[1]:
            self.found.append(f"{name} is {forms[0]}, not {forms[1]}")
            return
        if got.device.type == "meta":
            return
        if got.layout != torch.strided:
            got, expected = got.detach().to_dense(), expected.detach().to_dense()
        if not torch.equal(got.detach().nan_to_num(7.5), expected.detach().nan_to_num(7.5)):
            self.found.append(f"{name} is {short(got)}, not {short(expected)}")
        places = [one.untyped_storage().data_ptr() for one in (got, expected)]
        if 0 not in places and self.partners.setdefault(("memory", places[0]), places[1]) != places[1]:
            self.found.append(f"{name} shares memory with another tensor, which it should not")

    def scripts(self, got, expected, name):
        self.mappings(got.state_dict(), expected.state_dict(), name)

    def arrays(self, got, expected, name):
        if got.dtype != expected.dtype or not numpy.array_equal(got, expected):
            self.found.append(f"{name} is {short(got)}, not {short(expected)}")

    def mappings(self, got, expected, name):
        keys, others = list(got), list(expected)
        if "_hooks" in name:  # their keys are counted for all modules of the process
            self.sequences([None] * len(keys), [None] * len(others), name)
        else:
            self.sequences(keys, others, f"the keys of {name}")
        for key, other in zip(keys, others, strict=False):
            self.compare(got[key], expected[other], f"{name}[{key!r:.40}]")

    def sequences(self, got, expected, name):
        if len(got) != len(expected):
            self.found.append(
                f"{name} has {len(got)} entries, not {len(expected)}: {short(got)}, not {short(expected)}"
            )
        for at, (one, other) in enumerate(zip(got, expected, strict=False)):
            self.compare(one, other, f"{name}[{at}]")

    def sets(self, got, expected, name):
        self.sequences(sorted(got, key=repr), sorted(expected, key=repr), name)

    def functions(self, got, expected, name):
        if got.__code__.co_code != expected.__code__.co_code:
            self.found.append(f"{name} is another function")
        for part in ("__closure__", "__defaults__", "__kwdefaults__"):
            self.compare(getattr(got, part), getattr(expected, part), f"{name}.{part}")

    def cells(self, got, expected, name):
        contents = [{"contents": one.cell_contents} if holds(one) else {} for one in (got, expected)]
        self.mappings(*contents, name)

    def methods(self, got, expected, name):
        self.compare(got.__func__, expected.__func__, f"{name}.__func__")
        self.compare(got.__self__, expected.__self__, f"{name}.__self__")

    def classes(self, got, expected, name):
        own, others = ({key: one for key, one in vars(c).items() if key not in OF_CLASSES} for c in (got, expected))
        self.mappings(own, others, name)

    def results(self, got, expected, name):
        """Compare what a function gives of two objects."""
        for kind, function in RESULTS:
            if isinstance(got, kind):
                return self.compare(function(got), function(expected), name)
        return None


RESULTS = [
    (torch.Generator, torch.Generator.get_state),
    (random.Random, random.Random.getstate),
    (numpy.random.Generator, lambda own: own.bit_generator.state),
    (numpy.generic, numpy.generic.item),
    (functools.partial, lambda own: (own.func, own.args, own.keywords)),
    (weakref.ref, lambda own: own()),
    (contextvars.ContextVar, lambda own: own.get(None)),
    (io.StringIO, io.StringIO.getvalue),
    (itertools.count, repr),
    (itertools.cycle | type(iter([])), lambda own: list(itertools.islice(copy.deepcopy(own), 10))),
    (types.GeneratorType, lambda own: dict(own.gi_frame.f_locals) if own.gi_frame else None),
    (type(ctypes.c_int(0)).__mro__[-2], bytes),
    (type(functools.lru_cache(repr)), lambda own: own.cache_info().currsize),
    (property, lambda own: (own.fget, own.fset)),
    (staticmethod | classmethod, lambda own: own.__func__),
    (threading.local, vars),
    (types.ModuleType, lambda own: vars(own) if sys.modules.get(own.__name__) is not own else own.__name__),
    (type(sys), str),
]
"""What is compared instead of objects of some kinds."""

KINDS = [
    (torch.jit.ScriptModule, Comparison.scripts),
    (torch.Tensor, Comparison.tensors),
    (numpy.ndarray, Comparison.arrays),
    ((dict, types.MappingProxyType, collections.UserDict, weakref.WeakKeyDictionary), Comparison.mappings),
    ((list, tuple, collections.deque), Comparison.sequences),
    ((set, frozenset), Comparison.sets),
    (types.FunctionType, Comparison.functions),
    (types.MethodType, Comparison.methods),
    (types.CellType, Comparison.cells),
    (type, Comparison.classes),
    (object, Comparison.results),
]


def attributes(one):
    """Return the attributes of an object by name, those in slots too."""
    found = {}
    if hasattr(one, "__dict__") and not isinstance(one, LOCKS):
        found.update(vars(one))
    for base in type(one).__mro__:
        slots = vars(base).get("__slots__", ()) if base.__module__ not in ("builtins", "torch._tensor") else ()
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(one, name):
                found[name] = getattr(one, name)
    return found


def name_of(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def holds(cell):
    try:
        return bool([cell.cell_contents])
    except ValueError:
        return False


def only(these, others):
    return sorted(map(str, these.keys() - others.keys()))


def short(value):
    return " ".join(f"{value!r:.120}".split())
