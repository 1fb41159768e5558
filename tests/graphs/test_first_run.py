"""Modules that keep something of the rows they run on: captures, which run them on rows of their own, change nothing."""

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


FIRST = {
    into_parameter: "'loc'",
    into_buffer: "'mean'",
    as_new_buffer: "'mean'",
    as_attribute: "'shift'",
    as_number: "'factor'",
    into_list: "'box[0]'",
    into_list_in_place: "'box[0]'",
    into_deque: "'queue[0]'",
    resized: "'scratch'",
}


def refused(encoder, name, rows):
    with pytest.raises(vg.CaptureError) as raised:
        encoder(rows, lengths=[len(rows)])
    assert f"Keeping keeps what it computes from rows in {name}: captures run it on" in str(raised.value)


@pytest.mark.parametrize(("keep", "name"), FIRST.items(), ids=[keep.__name__ for keep in FIRST])
def test_what_the_first_rows_initialise_is_refused_by_name_and_left_as_it_was(keep, name):
    module, rows = Keeping(keep).eval(), rows_for([6])
    alone, encoder = copy.deepcopy(module), encoder_of(module)
    refused(encoder, name, rows)
    assert all(equal_bits(a, b) for a, b in zip(module.state_dict().values(), alone.state_dict().values(), strict=True))
    assert (module.ready, module.factor, module.shift) == (False, 1.0, None)
    assert not module.box[0].any()
    assert not module.queue[0].any()
    assert not module.scratch.numel()
    expected = alone(rows)
    assert equal_bits(encoder.eager(rows, lengths=[6]), expected)  # which initialises it by real rows
    assert distance(encoder(rows, lengths=[6]), expected) < 1e-6
    others = rows_for([9], 1)
    assert distance(encoder(others, lengths=[9]), alone(others)) < 1e-6
    assert encoder.stats.replays.total() == 2


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

    module = Normed()
    with pytest.raises(vg.CaptureError, match=r"in 'norms\[0\].running_mean', 'norms\[0\].running_var': captures"):
        encoder_of(module)(rows_for([6]), lengths=[6])
    assert not module.norms[0].running_mean.any()
    assert not module.norms[0].num_batches_tracked
    module.norms[0].eval()
    encoder = encoder_of(module)
    encoder(rows_for([6]), lengths=[6])
    assert encoder.stats.replays.total() == 1


def test_a_lazy_encoder_initialises_by_its_first_call():
    module, rows = Keeping(into_buffer).eval(), rows_for([6])
    alone, encoder = copy.deepcopy(module), encoder_of(module, capture=vg.Capture(lazy=True))
    for seed in range(2):
        assert distance(encoder(rows_for([6], seed), lengths=[6]), alone(rows_for([6], seed))) < 1e-6
        encoder.capture_wanted()
    assert encoder.stats.replays.total() == 1
    assert equal_bits(module.mean, rows.mean(0))


def test_an_error_in_the_first_run_leaves_nothing_behind():
    def fail(module, x):
        module.mean.add_(1)
        module.box.append(x)
        raise RuntimeError("too early")

    module = Keeping(fail)
    with pytest.raises(RuntimeError, match="too early"):
        encoder_of(module)(rows_for([6]), lengths=[6])
    assert not module.mean.any()
    assert len(module.box) == 1


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


def test_the_check_costs_a_module_that_keeps_nothing_no_run():
    runs = itertools.count()  # keeps nothing that is looked into

    class Counting(nn.Linear):
        def forward(self, x):
            next(runs)
            return super().forward(x)

    encoder = encoder_of(Counting(8, 8), budgets=[64], verify=vg.Verify(prove=False))
    encoder(rows_for([6]), lengths=[6])
    assert next(runs) == 2 + 3  # the probes, and two runs and the capture of the budget


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


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_a_module_whose_first_calls_differ_is_refused_until_it_has_settled(calls):
    module, rows = Warms(calls).eval(), rows_for([6])
    encoder = encoder_of(module)
    with pytest.raises(vg.CaptureError, match="Warms gives another output for the same rows after its first few runs"):
        encoder(rows, lengths=[6])
    assert module.left == calls
    for _ in range(calls):
        encoder.eager(rows, lengths=[6])
    assert distance(encoder(rows, lengths=[6]), module(rows)) < 1e-6
    assert encoder.stats.replays.total() == 1


def test_a_module_that_counts_its_calls_and_gives_the_same_output_is_captured():
    encoder, rows = encoder_of(Warms(2, doubles=False).eval()), rows_for([6])
    assert distance(encoder(rows, lengths=[6]), encoder.eager(rows, lengths=[6])) < 1e-6
    assert encoder.stats.replays.total() == 1
