"""`StateCheck`: modules that keep something between calls: the first call is that of the module, captures change nothing of it."""

import copy
import itertools
import time
from collections import deque

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import encoder_of, rows_for
from tests.support.towers import distance, equal_bits


class Keeping(nn.Module):
    """Normalises rows by what `keep` stored in the first run, or in every run."""

    def __init__(self, keep, always=False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("initted", torch.tensor(False))
        self.loc = nn.Parameter(torch.zeros(8))
        self.linear = nn.Linear(8, 8)
        self.ready, self.factor = False, 1.0
        self.shift, self.box, self.shifts = None, [torch.zeros(8)], {}
        self.queue, self.scratch = deque([torch.zeros(8)], maxlen=1), torch.zeros(0)
        self.keep, self.always = keep, always
        self.requires_grad_(False)

    def forward(self, x):
        if self.always or not self.ready:
            self.keep(self, x)
            self.ready = True
        x = self.linear(x - self.mean - self.loc - self.box[0] - self.queue[0]) * self.factor
        x = x - self.scratch.sum()
        return x if self.shift is None else x - self.shift


def into_parameter(module, x):
    if not module.initted:
        module.loc.data.copy_(x.mean(0))
        module.initted.fill_(True)


def into_buffer(module, x):
    module.mean.copy_(x.mean(0))


def as_new_buffer(module, x):
    module.mean = x.mean(0)


def as_attribute(module, x):
    module.shift = x.mean(0)


def as_number(module, x):
    module.factor = x.abs().max().item()


def into_list(module, x):
    module.box[0] = x.mean(0)


def into_list_in_place(module, x):
    module.box[0].copy_(x.mean(0))


def into_deque(module, x):
    module.queue.append(x.mean(0))


def resized(module, x):
    module.scratch.resize_(8).copy_(x.mean(0))


def running(module, x):
    module.mean.lerp_(x.mean(0), 0.1)


FIRST = [
    into_parameter, into_buffer, as_new_buffer, as_attribute, as_number, into_list, into_list_in_place, into_deque, resized,
]  # fmt: skip


def same_state(one, other):
    names = ("ready", "factor")
    tensors = [
        (*module.state_dict().values(), module.shift, module.box[0], module.queue[0], module.scratch)
        for module in (one, other)
    ]
    same = all(a is b is None or equal_bits(a, b) for a, b in zip(*tensors, strict=True))
    return same and all(getattr(one, name) == getattr(other, name) for name in names)


@pytest.mark.parametrize("keep", FIRST)
def test_the_first_call_initialises_a_module_as_a_plain_call_does(keep):
    module = Keeping(keep).eval()
    alone, encoder = copy.deepcopy(module), encoder_of(module)
    for seed, lengths in enumerate(([6], [9], [3, 4], [100])):
        rows = rows_for(lengths, seed)
        assert distance(encoder(rows, lengths=lengths), alone(rows)) < 1e-6
        assert same_state(module, alone)
    assert encoder.stats.replays.total() == 4


@pytest.mark.parametrize("keep", FIRST)
def test_what_a_synthetic_call_would_initialise_is_refused_and_left_as_it_was(keep):
    module, rows = Keeping(keep).eval(), rows_for([6])
    alone = copy.deepcopy(module)
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64, 128], spec, backend="tape")
    with pytest.raises(vg.errors.CaptureError, match=r"Keeping (keeps what it computes from rows in|writes to 'loc')"):
        encoder.capture()
    assert same_state(module, alone)
    assert distance(encoder(rows, lengths=[6]), alone(rows)) < 1e-6
    assert same_state(module, alone)


@pytest.mark.parametrize("keep", FIRST)
def test_a_capture_ahead_of_calls_initialises_by_its_example(keep):
    module, rows = Keeping(keep).eval(), rows_for([6])
    alone, encoder = copy.deepcopy(module), encoder_of(module)
    alone(rows)
    encoder.capture({"x": rows, "lengths": [6]})
    assert same_state(module, alone)
    assert not encoder.stats.calls
    assert "the first call of each of these will be compared with the module itself; rows: 64, 128" in encoder.report()
    others = rows_for([9], 1)
    assert distance(encoder(others, lengths=[9]), alone(others)) < 1e-6
    assert encoder.stats.replays.total() == 1
    assert "will be compared with the module itself; rows: 128" in encoder.report()


def test_an_example_that_is_no_call_is_refused():
    encoder = encoder_of(Keeping(into_buffer).eval())
    with pytest.raises(vg.errors.InputError, match="expected a call as a dict of its arguments by name"):
        encoder.capture([rows_for([6])])
    with pytest.raises(vg.errors.InputError, match="argument 'lengths' is missing"):
        encoder.capture({"x": rows_for([6])})


def refused(encoder, name, rows):
    with pytest.raises(vg.errors.CaptureError) as raised:
        encoder(rows, lengths=[len(rows)])
    assert f"Keeping keeps what it computes from rows in {name}: a graph would not follow it" in str(raised.value)


def test_statistics_of_every_run_are_refused():
    refused(encoder_of(Keeping(running, always=True)), "'mean'", rows_for([6]))


def test_statistics_of_parts_in_training_mode_are_refused():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = [nn.BatchNorm1d(8)]  # where nothing registers it
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.norms[0](x) * self.weight

    module, rows = Normed(), rows_for([6])
    alone = copy.deepcopy(module)
    with pytest.raises(
        vg.errors.CaptureError, match=r"in 'norms\[0\].running_mean', 'norms\[0\].running_var': a graph"
    ):
        encoder_of(module)(rows, lengths=[6])
    alone(rows)
    states = [one.norms[0].state_dict().values() for one in (module, alone)]
    assert all(map(equal_bits, *states))
    module.norms[0].eval()
    encoder = encoder_of(module)
    encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 1


def test_a_lazy_encoder_initialises_by_its_first_call():
    module, rows = Keeping(into_buffer).eval(), rows_for([6])
    alone, encoder = copy.deepcopy(module), encoder_of(module, capture=vg.options.Capture(lazy=True))
    for seed in range(2):
        assert distance(encoder(rows_for([6], seed), lengths=[6]), alone(rows_for([6], seed))) < 1e-6
        encoder.capture_pending()
    assert encoder.stats.replays.total() == 1
    assert equal_bits(module.mean, rows.mean(0))


def test_an_error_in_the_first_call_is_that_of_the_module():
    def fail(module, x):
        module.mean.add_(1)
        module.box.append(x)
        raise RuntimeError("too early")

    module = Keeping(fail)
    with pytest.raises(RuntimeError, match="too early"):
        encoder_of(module)(rows_for([6]), lengths=[6])
    assert equal_bits(module.mean, torch.ones(8))
    assert len(module.box) == 2


# What may change in a first run


class Caching(nn.Module):
    """Fills caches by size, counts, and keeps what nothing reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.linear = nn.Linear(8, 8)
        self.masks, self.runs, self.built, self.noise, self.seconds = {}, 0, None, None, 0.0
        self.last, self.log = None, []

    def forward(self, x):
        self.runs += 1
        self.seconds = time.perf_counter()
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(4096, device=x.device).float().cos()[:, None]
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.ones(len(x), 8, device=x.device)
        if self.built is None:
            self.built = nn.Linear(x.shape[1], 8)
            self.noise = torch.randn(8)
        self.last = x * 2
        self.log[:] = [x.sum(0)]
        return self.linear(x) * self.masks[len(x)] + self.built(x) + self.noise


@pytest.mark.filterwarnings("ignore:.* tensors were made while graphs were captured")
def test_caches_counters_and_what_nothing_reads_may_change():
    encoder = encoder_of(Caching().eval().requires_grad_(False))
    for lengths in ([6], [100], [3, 4]):
        rows = rows_for(lengths)
        assert distance(encoder(rows, lengths=lengths), encoder.eager(rows, lengths=lengths)) < 1e-6
    assert encoder.stats.replays.total() == 3


def test_the_check_costs_a_module_that_keeps_nothing_few_runs():
    runs = itertools.count()  # shared by shadows: nothing of Python's

    class Counting(nn.Linear):
        def forward(self, x):
            next(runs)
            return super().forward(x)

    encoder = encoder_of(Counting(8, 8).eval(), budgets=[64], verify=vg.options.Verify(at_capture=False))
    encoder(rows_for([6]), lengths=[6])
    # The call, its repetition and a run at capacity; the probes; a run and the capture of the budget.
    assert next(runs) == 3 + 2 + 2


class Warms(nn.Linear):
    """Doubles the rows of its first calls."""

    def __init__(self, calls, doubles=True):
        super().__init__(8, 8)
        self.left, self.doubles = calls, doubles
        self.requires_grad_(False)

    def forward(self, x):
        doubles = self.left > 0 and self.doubles
        self.left -= 1
        return super().forward(2 * x if doubles else x)


def each_call_is_that_of_the_module(module, calls):
    alone, encoder = copy.deepcopy(module), encoder_of(module)
    for at in range(calls):
        rows = rows_for([6 + at % 3], at)
        assert distance(encoder(rows, lengths=[len(rows)]), alone(rows)) < 1e-6
    return encoder


REFUSED = "ignore:.*failed verification"


@pytest.mark.filterwarnings(REFUSED)
@pytest.mark.parametrize("calls", [1, 2, 5, 30, 300])
def test_a_module_whose_first_calls_differ_answers_itself(calls):
    encoder = each_call_is_that_of_the_module(Warms(calls).eval(), calls + 5)
    assert not encoder.stats.replays or calls == 1


def test_a_module_whose_first_calls_differ_is_captured_once_it_has_settled():
    module, rows = Warms(3).eval(), rows_for([6])
    for _ in range(3):
        module(rows)
    encoder = encoder_of(module)
    assert distance(encoder(rows, lengths=[6]), module(rows)) < 1e-6
    assert encoder.stats.replays.total() == 1


def test_a_module_that_counts_its_calls_and_gives_the_same_output_is_captured():
    encoder, rows = encoder_of(Warms(2, doubles=False).eval()), rows_for([6])
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6
    assert encoder.stats.replays.total() == 1
    assert "kept by runs of the module, which changes no output, and not by replays: 'left'" in encoder.report()


# What later outputs depend on


class Observer(nn.Module):
    """Rounds rows by the largest number that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor(10.0))

    def forward(self, x):
        self.largest.copy_(torch.fmax(self.largest, torch.where(x.isfinite(), x.abs(), 0).max()))
        return torch.round(x / self.largest * 127) / 127 * self.largest


class Counter(nn.Module):
    """Doubles rows from the call after the fortieth on."""

    def __init__(self, calls=None):
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(())) if calls is None else calls

    def forward(self, x):
        if isinstance(self.calls, torch.Tensor):
            self.calls.add_(1)
            return torch.where(self.calls > 40, x * 2, x)
        self.calls += 1
        return x * 2 if self.calls > 40 else x


class Table(nn.Module):
    """Stretches its table for good when a longer input comes than any graph holds."""

    def __init__(self):
        super().__init__()
        self.longest = 512
        self.register_buffer("table", torch.arange(1.0, 9.0))

    def forward(self, x):
        if len(x) > self.longest:
            self.longest = len(x)
            self.table.div_(len(x) / 512)
        return x * self.table


class Dynamic(nn.Module):
    """Stretches its rows by the longest input so far, as dynamic rotary tables do."""

    def __init__(self):
        super().__init__()
        self.linear, self.longest = nn.Linear(8, 8), 0

    def forward(self, x):
        self.longest = max(self.longest, len(x))
        return self.linear(x) * (1 + max(0, self.longest - 48) / 48)


class Logged(nn.Module):
    """Doubles rows once its log is long."""

    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x):
        self.log.append(len(x))
        return x * 2 if len(self.log) > 40 else x


MODULES = {
    "an observer": Observer, "a counter": Counter, "a number": lambda: Counter(0), "a table": Table, "a maximum": Dynamic,
    "a log": Logged,
}  # fmt: skip


@pytest.mark.filterwarnings(REFUSED)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_module_whose_outputs_depend_on_earlier_calls_answers_itself(make):
    module = make().eval().requires_grad_(False)
    alone = copy.deepcopy(module)
    encoder = encoder_of(module, budgets=[64, 512])
    for at in range(45):
        lengths = ([12, 8], [40], [600], [7, 7, 7])[at % 4]
        rows = rows_for(lengths, at) * (1 + at)
        torch.testing.assert_close(encoder(rows, lengths=lengths), alone(rows))
    assert all(map(torch.equal, module.state_dict().values(), alone.state_dict().values()))
    assert getattr(module, "longest", 0) == getattr(alone, "longest", 0)
    assert encoder.stats.eager.keys() <= {"its budget failed verification", "larger than every budget"}


class Filled(nn.Module):
    """Fills its tables in its first run, for the rows that it then has, and later for more."""

    def __init__(self):
        super().__init__()
        self.rows = 0
        self.register_buffer("table", torch.zeros(2048))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        if len(x) > self.rows:
            self.table[: len(x)].fill_(2)
            self.rows = len(x)
        return x * self.table[: len(x), None]


@pytest.mark.parametrize("prove", [True, False])
def test_captures_fill_no_table_of_the_module(prove):
    module, rows = Filled().eval(), rows_for([12, 8])
    encoder = encoder_of(module, budgets=[64, 128, 512], verify=vg.options.Verify(at_capture=prove))
    for _ in range(3):
        assert torch.equal(encoder(rows, lengths=[12, 8]), rows * 2)
    assert (module.rows, module.table.count_nonzero(), module.calls) == (20, 20, 1)
    assert torch.equal(encoder(rows_for([300]), lengths=[300]), rows_for([300]) * 2)
    expected = (300, 300, 2) if prove else (20, 20, 1)  # the first call of each graph is compared with the module
    assert (module.rows, module.table.count_nonzero(), module.calls) == expected
    assert not encoder.stats.eager


def test_a_capture_that_fails_leaves_the_state_of_one_call():
    class Fails(Counter):
        def forward(self, x):
            return super().forward(x) * float(x.isnan().any())

    module = Fails().eval()
    encoder = encoder_of(module)
    for calls in (1, 2):
        with pytest.raises(vg.errors.CaptureError):
            encoder(rows_for([6]), lengths=[6])
        assert module.calls == calls


def test_numbers_that_tell_of_a_table_are_those_of_the_first_call():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.size, self.table = 0, None

        def forward(self, x):
            if len(x) != self.size:
                self.size, self.table = len(x), torch.arange(1.0, 1 + len(x), device=x.device)[:, None]
            return x + self.table * 0

    module, rows = Positions().eval(), rows_for([6])
    encoder = encoder_of(module, budgets=[16, 64])
    assert torch.equal(encoder(rows, lengths=[6]), rows)
    assert module.size == len(module.table) == 6
    assert encoder.stats.replays.total() == 1


class PeakOfShortCalls(nn.Module):
    """Scales by the largest number that a call of few rows has had; calls of as many rows as graphs have keep none."""

    def __init__(self):
        super().__init__()
        self.norm, self.peak = nn.LayerNorm(8), 0.0

    def forward(self, x):
        if len(x) < 12:
            self.peak = max(self.peak, x.abs().max().item())
        return self.norm(x) * (1 + self.peak / 64)


@pytest.mark.parametrize("factor", [1.0, 1000.0])
@pytest.mark.parametrize("used", [False, True], ids=["cold", "used before"])
@torch.no_grad()
def test_a_maximum_that_only_calls_of_few_rows_raise_is_found(factor, used):
    module, plain = PeakOfShortCalls().eval(), PeakOfShortCalls().eval()
    spec = vg.BufferSpec("x", vg.Lengths("lengths"))
    if used:
        assert torch.equal(module(factor * rows_for([5])), plain(factor * rows_for([5])))
    encoder = vg.GraphedEncoder(module, [64], spec, backend="tape")
    for at in range(6):
        rows = factor * (1 + at) * rows_for([5], at)
        assert torch.allclose(encoder(rows, lengths=[5]), plain(rows))


def test_state_that_each_call_replaces_is_the_module_own():
    """A clone of what the first call left behind is no tensor that something else keeps, once a run has replaced it."""

    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("start", torch.ones(1 << 12))
            self.state = None

        def forward(self, x):
            state = self.start if self.state is None else self.state
            self.state = state + 1
            return x + state[:1]

    encoder = encoder_of(Replacing(), budgets=[64], verify=vg.options.Verify(at_capture=False))
    rows = rows_for([6])
    expected = encoder(rows, lengths=[6])  # by the state of the capture, as nothing is verified
    assert equal_bits(encoder(rows, lengths=[6]), expected)
    assert encoder.stats.replays.total() == 2
