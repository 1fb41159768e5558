"""`Shadow` of code: what it keeps of its first rows, in globals, closures, caches and classes, is of the first call."""

import collections
import dataclasses
import functools
import importlib
import types

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import encoder_of, rows_for
from tests.support.towers import distance

SCALE = None
FACTOR = None
BY_DTYPE = {}
LISTED = []
QUEUE = collections.deque()
HELD = {}
SETTINGS = types.SimpleNamespace(mean=None)


class Centred(nn.Module):
    """Subtracts from its rows what a function returns for them."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.eval().requires_grad_(False)

    def forward(self, x):
        return self.linear(x - self.function(x))


def a_global(x):
    global SCALE
    if SCALE is None:
        SCALE = x.abs().max()
    return SCALE


def a_number(x):
    global FACTOR
    if FACTOR is None:
        FACTOR = x.abs().max().item()
    return FACTOR


def a_global_that_is_not_set_before(x):
    global UNSET
    try:
        return UNSET
    except NameError:
        UNSET = x.mean(0)
        return UNSET


def a_dict(x):
    if x.dtype not in BY_DTYPE:
        BY_DTYPE[x.dtype] = x.mean(0)
    return BY_DTYPE[x.dtype]


def a_list(x):
    if not LISTED:
        LISTED.append(x.mean(0))
    return LISTED[0]


def an_object(x):
    if SETTINGS.mean is None:
        SETTINGS.mean = x.mean(0)
    return SETTINGS.mean


def a_deque(x):
    if not QUEUE:
        QUEUE.append(x.mean(0))
    return QUEUE[0]


@dataclasses.dataclass(slots=True)
class Slotted:
    mean: torch.Tensor | None = None


SLOTTED = Slotted()


def an_object_with_slots(x):
    if SLOTTED.mean is None:
        SLOTTED.mean = x.mean(0)
    return SLOTTED.mean


def an_iterator(x):
    """What it keeps cannot be looked into."""
    if "numbers" not in BY_DTYPE:
        BY_DTYPE["numbers"] = iter([x.abs().max().item()])
    return BY_DTYPE["numbers"].__reduce__()[1][0][0]


def a_python_module(x):
    if not hasattr(settings_file, "mean"):
        settings_file.mean = x.mean(0)
    return settings_file.mean


settings_file = types.ModuleType("settings_file")


def a_default(x, cache={}):  # noqa: B006
    return cache.setdefault("mean", x.mean(0))


def a_function_attribute(x):
    if not hasattr(a_function_attribute, "mean"):
        a_function_attribute.mean = x.mean(0)
    return a_function_attribute.mean


class Statistics:
    mean = None

    def __call__(self, x):
        if Statistics.mean is None:
            Statistics.mean = x.mean(0)
        return self.mean


def a_class(x):
    return Statistics()(x)


@functools.lru_cache
def held_mean():
    return HELD["x"].mean(0)


def an_lru_cache(x):
    HELD["x"] = x
    return held_mean()


def through_other_functions(x):
    return next(another(x) for _ in range(1))


def another(x):
    return (lambda y: a_list(y))(x)


def of_a_closure():
    mean = None

    def a_closure(x):
        nonlocal mean
        if mean is None:
            mean = x.mean(0)
        return mean

    return a_closure


def in_place_of_a_closure():
    mean, ready = torch.zeros(8), []

    def in_place(x):
        if not ready:
            mean.copy_(x.mean(0))
            ready.append(True)
        return mean

    return in_place


def of_a_decorator():
    def once(function):
        results = []

        @functools.wraps(function)
        def run(x):
            if not results:
                results.append(function(x))
            return results[0]

        return run

    return once(lambda x: x.mean(0))


KEEPING = [
    a_global, a_number, a_global_that_is_not_set_before, a_dict, a_list, an_iterator, a_deque, an_object,
    an_object_with_slots, a_python_module, a_default, a_function_attribute, a_class, an_lru_cache,
    through_other_functions, of_a_closure(), in_place_of_a_closure(), functools.partial(of_a_closure()),
    of_a_decorator(),
]  # fmt: skip


def name_of(function):
    return getattr(function, "__name__", "partial")


@pytest.fixture(autouse=True)
def code_as_it_was():
    """The tests share globals and functions."""
    yield
    globals().update(SCALE=None, FACTOR=None)
    globals().pop("UNSET", None)
    BY_DTYPE.clear(), LISTED.clear(), HELD.clear(), held_mean.cache_clear()
    a_default.__defaults__[0].clear()
    vars(a_function_attribute).clear(), vars(settings_file).pop("mean", None)
    QUEUE.clear()
    SETTINGS.mean = SLOTTED.mean = Statistics.mean = None


@pytest.mark.filterwarnings("ignore:graphs read .* tensor")
@pytest.mark.parametrize("function", KEEPING, ids=name_of)
def test_what_code_keeps_of_the_first_rows_is_that_of_the_first_call(function):
    module, rows = Centred(function), rows_for([6])
    encoder = encoder_of(module)
    got = encoder(rows, lengths=[6])
    kept = function(rows_for([9], 2))
    expected = rows.abs().max() if function in (a_global, a_number, an_iterator) else rows.mean(0)
    assert torch.as_tensor(kept - expected).abs().max() < 1e-6
    assert distance(got, module.linear(rows - kept)) < 1e-6
    others = rows_for([9], 1)
    assert distance(encoder(others, lengths=[9]), module(others)) < 1e-6
    assert encoder.stats.replays.total() == 2


# What code may keep

TABLES, COUNTS, LOADED = {}, [], None


@functools.lru_cache
def table(rows, device):
    return torch.arange(rows, device=device).float().cos()


@functools.cache
def constant(size, *, scale=2.0):
    return torch.full((size,), scale)


def by_size(x):
    if len(x) not in TABLES:
        TABLES[len(x)] = torch.ones(len(x), 8)
    COUNTS.append(len(x))
    return TABLES[len(x)] + table(4096, x.device)[:8] + constant(8, scale=3.0)


def lazily_imported(x):
    global LOADED
    if LOADED is None:
        LOADED = importlib.import_module("math")
    return LOADED.pi


def random_once(x, cache=[]):  # noqa: B006
    if not cache:
        cache.append(torch.randn(8))
    return cache[0]


@pytest.mark.parametrize("function", [by_size, lazily_imported, random_once], ids=name_of)
def test_caches_by_size_counters_imports_and_constants_may_be_kept(function):
    encoder = encoder_of(Centred(function))
    for lengths in ([6], [100], [3, 4]):
        rows = rows_for(lengths)
        assert distance(encoder(rows, lengths=lengths), encoder.eager(rows, lengths=lengths)) < 1e-6
    assert encoder.stats.replays.total() == 3


# Rows of token ids


class Embedding(nn.Module):
    def __init__(self, ids=100):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mean = nn.Embedding(ids, 8), None
        self.eval().requires_grad_(False)

    def forward(self, ids):
        x = self.table(ids)
        if self.mean is None:
            self.mean = x.mean(0)
        return x - self.mean


@pytest.mark.parametrize("pad", [0, 7, 99])
def test_what_is_kept_of_token_ids_is_that_of_the_first_call(pad):
    spec = vg.BufferSpec(vg.inputs.Rows("ids", shape=(), dtype=torch.int64, pad=pad), vg.Lengths())
    module = Embedding()
    encoder = vg.GraphedEncoder(module, [64, 128], spec, backend="tape")
    ids = torch.tensor([5, 7, 99])
    with pytest.raises(vg.errors.CaptureError, match="Embedding keeps what it computes from rows in 'mean'"):
        encoder.capture()
    assert module.mean is None
    expected = module.table(ids) - module.table(ids).mean(0)
    assert distance(encoder(ids, lengths=[3]), expected) < 1e-6
    assert distance(encoder(ids, lengths=[3]), expected) < 1e-6
    assert distance(module.mean, module.table(ids).mean(0)) < 1e-6
