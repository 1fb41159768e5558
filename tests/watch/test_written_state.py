"""Captures and proofs run a module, on rows of their own and on NaN: what they write into its state is put back."""

import copy

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import encoder_of, rows_for


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

    def __init__(self, parameter=False):
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), False) if parameter else nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return torch.where(self.calls > 40, x * 2, x)


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


MODULES = {"observer": Observer, "counter": Counter, "counted by a parameter": lambda: Counter(True), "table": Table}


@pytest.mark.filterwarnings("ignore:.*failed the proof")
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("prove", [True, False])
def test_calls_go_on_from_the_state_before_the_capture(make, prove):
    module = make().eval()
    alone, rows = copy.deepcopy(module), rows_for([12, 8])
    encoder = encoder_of(module, budgets=[64, 512], verify=vg.Verify(prove=prove))
    for _ in range(45):
        torch.testing.assert_close(encoder(rows, lengths=[12, 8]), alone(rows))
    assert all(map(torch.equal, module.state_dict().values(), alone.state_dict().values()))
    assert getattr(module, "longest", 0) == getattr(alone, "longest", 0)


def test_a_capture_that_fails_leaves_the_state_as_it_was():
    class Fails(Counter):
        def forward(self, x):
            return super().forward(x) * float(x.isnan().any())

    module = Fails().eval()
    encoder = encoder_of(module)
    for _ in range(2):
        with pytest.raises(vg.CaptureError):
            encoder(rows_for([6]), lengths=[6])
    assert module.calls == 0


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
def test_what_first_runs_filled_and_graphs_read_stays(prove):
    module, rows = Filled().eval(), rows_for([12, 8])
    encoder = encoder_of(module, budgets=[64, 128, 512], verify=vg.Verify(prove=prove))
    for _ in range(3):
        assert torch.equal(encoder(rows, lengths=[12, 8]), rows * 2)
    assert torch.equal(encoder(rows_for([300]), lengths=[300]), rows_for([300]) * 2)
    assert not encoder.stats.eager
    assert module.calls == 4


@pytest.mark.filterwarnings("ignore:.*failed the proof")
def test_numbers_that_every_run_changes_are_those_before_the_capture():
    """The first call runs eager, because its output changes from call to call: it is that of the module's own first."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    module, rows = Counts().eval(), rows_for([6])
    encoder = encoder_of(module)
    assert torch.equal(encoder(rows, lengths=[6]), rows)
    assert module.calls == 1
    assert torch.equal(encoder(rows, lengths=[6]), rows * 2)


def test_numbers_that_tell_of_a_table_stay():
    """A capture runs at other sizes: the table is that of the last run, and so is the number."""

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
    expected = module(rows)
    assert torch.equal(encoder(rows, lengths=[6]), expected)
    assert module.size == len(module.table)
    assert torch.equal(module(rows), expected)


def test_a_buffer_that_counts_rows_counts_those_of_budgets():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(()))

        def forward(self, x):
            self.rows += len(x)
            return x * 2

    module = Counts().eval()
    encoder = encoder_of(module, budgets=[vg.Budget(64)])
    encoder(rows_for([60, 60, 60]), lengths=[60, 60, 60])
    assert module.rows == 3 * 64
