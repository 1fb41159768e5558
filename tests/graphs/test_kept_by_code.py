"""What code keeps of the rows of its first run, in globals, closures, caches and classes, is refused and undone."""

import collections
import dataclasses
import functools
import importlib
import sys
import types

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import encoder_of, rows_for
from tests.support.towers import distance, equal_bits
from varlen_graphs.watch.kept_state import KeptState

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


KEEPING = {
    a_global: "test_kept_by_code.SCALE'",
    a_number: "test_kept_by_code.FACTOR'",
    a_global_that_is_not_set_before: "test_kept_by_code.UNSET'",
    a_dict: "test_kept_by_code.BY_DTYPE[torch.float32]'",
    a_list: "test_kept_by_code.LISTED[0]'",
    an_iterator: "BY_DTYPE['numbers']",
    a_deque: "test_kept_by_code.QUEUE[0]'",
    an_object: "test_kept_by_code.SETTINGS.mean'",
    an_object_with_slots: "test_kept_by_code.SLOTTED.mean'",
    a_python_module: "'settings_file.mean'",
    a_default: "\"a_default.__defaults__[0]['mean']\"",
    a_function_attribute: "a_function_attribute.mean'",
    a_class: "'Statistics.mean'",
    an_lru_cache: "'held_mean (cached).",
    through_other_functions: "test_kept_by_code.LISTED[0]'",
    of_a_closure(): "'of_a_closure.a_closure.mean'",
    in_place_of_a_closure(): "'in_place_of_a_closure.in_place.mean'",
    functools.partial(of_a_closure()): "'of_a_closure.a_closure.mean'",
    of_a_decorator(): "results[0]'",
}


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


@pytest.mark.parametrize(("function", "name"), KEEPING.items(), ids=map(name_of, KEEPING))
def test_what_code_keeps_of_the_first_rows_is_refused_by_name_and_undone(function, name):
    module, rows = Centred(function), rows_for([6])
    encoder = encoder_of(module)
    with pytest.raises(vg.CaptureError, match="Centred keeps what it computes from rows in ") as raised:
        encoder(rows, lengths=[6])
    assert name in str(raised.value)
    expected = module(rows)  # which initialises it by real rows
    assert distance(expected, module.linear(rows - (rows - rows + function(rows)))) < 1e-6
    others = rows_for([9], 1)
    assert distance(encoder(others, lengths=[9]), module(others)) < 1e-6
    assert distance(encoder(rows, lengths=[6]), expected) < 1e-6
    assert encoder.stats.replays.total() == 2


@pytest.mark.parametrize("function", [a_global, of_a_closure(), an_lru_cache], ids=name_of)
def test_what_code_keeps_is_as_if_no_capture_had_been_tried(function):
    module, rows = Centred(function), rows_for([6])
    with pytest.raises(vg.CaptureError):
        encoder_of(module)(rows_for([6], 1), lengths=[6])
    kept = rows.abs().max() if function is a_global else rows.mean(0)
    assert equal_bits(module(rows), module.linear(rows - kept))


def test_what_a_declared_forward_keeps_is_refused():
    def forward(module, x):
        return module.linear(x - a_list(x))

    with pytest.raises(vg.CaptureError, match=r"LISTED\[0\]"):
        encoder_of(Centred(a_list), forward=forward)(rows_for([6]), lengths=[6])
    assert not LISTED


def test_a_class_attribute_of_the_module_is_refused():
    class Base(Centred):
        statistics = {}  # noqa: RUF012

    class Module(Base):
        def forward(self, x):
            return self.linear(x - self.statistics.setdefault("mean", x.mean(0)))

    with pytest.raises(vg.CaptureError, match=r"Base.statistics\['mean'\]"):
        encoder_of(Module(None))(rows_for([6]), lengths=[6])
    assert not Base.statistics


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


def test_what_was_imported_in_the_first_run_stays():
    encoder_of(Centred(lazily_imported))(rows_for([6]), lengths=[6])
    before, globals()["LOADED"] = LOADED, None
    state = KeptState([("", Centred(lazily_imported))])
    lazily_imported(None)
    state.restore()
    assert LOADED is before is sys.modules["math"]


def test_a_first_run_that_cannot_be_repeated_is_refused_until_it_ran_on_real_rows():
    COUNTS.clear()
    library = importlib.import_module("logging").getLogger("registered once")

    def register(x):
        if not COUNTS:
            if hasattr(library, "operator"):
                raise RuntimeError("registered twice")
            library.operator = True  # of a library, whose variables are left alone
            COUNTS.append(len(x))
        return len(COUNTS)

    encoder, rows = encoder_of(Centred(register)), rows_for([6])
    with pytest.raises(vg.CaptureError, match=r"fails if that is undone and it runs again .*: registered twice"):
        encoder(rows, lengths=[6])
    del library.operator
    expected = encoder.eager(rows, lengths=[6])
    assert distance(encoder(rows, lengths=[6]), expected) < 1e-6


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
def test_what_is_kept_of_token_ids_is_refused(pad):
    spec = vg.BufferSpec(vg.PackedRows("ids", shape=(), dtype=torch.int64, pad=pad), vg.Lengths())
    encoder = vg.GraphedEncoder(Embedding(), [64, 128], spec, backend="tape")
    ids = torch.tensor([5, 7, 99])
    with pytest.raises(vg.CaptureError, match="Embedding keeps what it computes from rows in 'mean'"):
        encoder(ids, lengths=[3])
    assert encoder.module.mean is None
    expected = encoder.eager(ids, lengths=[3])
    assert distance(encoder(ids, lengths=[3]), expected) < 1e-6
