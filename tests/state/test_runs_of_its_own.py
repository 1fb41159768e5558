"""What the module itself changes in runs of its own, and no run for captures has shown, graphs are captured anew for."""

from contextlib import suppress

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.segments import relative


class Widens(nn.Module):
    """Has another output from its first call of this many rows on."""

    def __init__(self, rows, places):
        super().__init__()
        self.lin, self.rows, self.places = nn.Linear(8, 8), rows, places
        self.wide, self.kept, self.by_name = False, [0], {}

    def forward(self, x):
        if len(x) == self.rows:
            if self.places == "attribute":
                self.wide = True
            elif self.places == "list":
                self.kept[0] = 1
            else:
                self.by_name["wide"] = True
        return self.lin(x) * (2 if self.wide or self.kept[0] or self.by_name else 1)


@pytest.mark.parametrize("place", ["attribute", "list", "dict"])
@pytest.mark.parametrize("rows", [299, 77])
def test_graphs_follow_what_a_run_of_the_module_itself_changes(place, rows):
    """A call beyond the budgets, or the first one of its budget."""
    module, plain = Widens(rows, place).eval(), Widens(rows, place).eval()
    plain.load_state_dict(module.state_dict())
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64, 256], spec, backend="tape")
    for lengths in ([5], [7], [rows], [5], [40, 2], [9], [100]):
        x = rows_for(lengths)
        assert relative(encoder(x, lengths=lengths), plain(x)) < 1e-5
    assert encoder.stats.replays.total() >= 4


class CountsWhereAsked(nn.Module):
    """Counts rows in calls with one value of a static argument, and never in others."""

    def __init__(self):
        super().__init__()
        self.lin, self.seen = nn.Linear(8, 8), 0

    def forward(self, x, remember=False):
        if remember:
            self.seen += len(x)
        return self.lin(x)


def test_what_calls_with_another_static_argument_change_is_no_change_by_the_user():
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(CountsWhereAsked().eval(), [64, 256], spec, backend="tape")
    x = rows_for([5])
    for remember in (False, True, False, True, True, False):
        assert relative(encoder(x, lengths=[5], remember=remember), encoder.module.lin(x)) < 1e-6
        encoder.check()
    assert encoder.stats.replays.total() == 6


class SetsItselfUp(nn.Module):
    """Writes to its weights in calls of many rows."""

    def __init__(self, write):
        super().__init__()
        self.lin, self.scale, self.write = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), write
        self.others = [nn.Parameter(torch.ones(8))]

    def forward(self, x):
        if len(x) > 100:
            self.write(self)
        return self.lin(x) * self.scale * self.others[0]


@pytest.mark.parametrize(
    "write",
    [
        lambda module: module.scale.fill_(2.0),
        lambda module: module.scale.mul_(2.0),
        lambda module: module.scale.data.mul_(2.0),
        lambda module: module.others[0].mul_(2.0),
    ],
    ids=["fill", "mul", "data", "listed"],
)
@pytest.mark.parametrize("budgets", [[64, 128], [64, 1024], None], ids=["few", "large", "default"])
def test_no_run_of_the_library_writes_to_weights(write, budgets):
    module = SetsItselfUp(write).eval().requires_grad_(False)
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, budgets, spec, backend="tape")
    x = rows_for([5, 9])
    expected = module(x)
    for _ in range(3):
        with suppress(vg.errors.CaptureError):  # which says so
            assert relative(encoder(x, lengths=[5, 9]), expected) < 1e-5
    assert torch.equal(module.scale, torch.ones(8))
    assert torch.equal(module.others[0], torch.ones(8))


class RemembersLoudCalls(nn.Module):
    """Has another output after a long call of large numbers, which no run for captures brings."""

    def __init__(self):
        super().__init__()
        self.lin, self.peak = nn.Linear(8, 8), torch.zeros(())

    def forward(self, x):
        y = self.lin(x) * torch.where(self.peak > 50, 2, 1)
        if len(x) > 48:
            self.peak = x.max()
        return y


def test_graphs_are_compared_again_where_the_module_itself_has_changed_what_it_keeps():
    module, plain = RemembersLoudCalls().eval(), RemembersLoudCalls().eval()
    plain.load_state_dict(module.state_dict())
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64, 256], spec, backend="tape")
    for lengths, scale in (([5], 1), ([5], 1), ([150], 100), ([5], 1), ([5], 1)):
        x = scale * rows_for(lengths)
        assert relative(encoder(x, lengths=lengths), plain(x)) < 1e-5


def test_what_the_user_changes_before_such_a_run_is_no_change_by_the_module():
    module = Widens(299, "list").eval()
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64, 256], spec, backend="tape")
    encoder(rows_for([5]), lengths=[5])
    module.wide = True
    x = rows_for([300])  # beyond the budgets
    with pytest.raises(vg.errors.StaleGraphError, match="'wide' changed from False to True"):
        encoder.check()
    assert torch.equal(encoder(x, lengths=[300]), module.lin(x) * 2)
    assert relative(encoder(x[:5], lengths=[5]), module.lin(x[:5]) * 2) < 1e-6


KEPT = []


def lengths_of(table):
    KEPT.append(table.values)
    return table.item_rows[table.row_item]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, scale):
        return self.lin(x) * scale[:, None]


def test_what_a_buffer_keeps_of_the_items_is_nothing_of_the_rows():
    buffer = vg.buffers.DeviceBuffer("scale", lengths_of)
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths(), [buffer])
    encoder = vg.GraphedEncoder(Scaled().eval(), [16, 32], spec, backend="tape").capture()
    rows = rows_for([3, 4])
    assert relative(encoder(rows, lengths=[3, 4]), encoder.eager(rows, lengths=[3, 4])) < 1e-5
    assert encoder.stats.replays.total() == 1


class TableOfTheLastLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.length = nn.Linear(8, 8), 0
        self.register_buffer("table", torch.zeros(512, 8), persistent=False)

    def forward(self, x):
        if len(x) != self.length:
            self.table.zero_()
            self.table[: len(x)] = 1
            self.length = len(x)
        return self.lin(x) * self.table[: len(x)]


def test_what_a_capture_writes_for_its_size_is_not_read_by_earlier_graphs():
    module, plain = TableOfTheLastLength().eval(), TableOfTheLastLength().eval()
    plain.load_state_dict(module.state_dict())
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64, 128, 256], spec, backend="tape")
    for rows in (250, 60, 250, 120, 250, 60, 120):
        x = rows_for([rows])
        assert relative(encoder(x, lengths=[rows]), plain(x)) < 1e-5
    assert encoder.stats.replays.total() == 7


class ByABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.lin(x) * self.scale


class Counted(dict):
    """Counts its copies, one for each copy of the module and each look at what that holds."""

    copies = 0

    def __copy__(self):
        Counted.copies += 1
        return Counted(self)


def test_later_graphs_of_a_module_that_keeps_nothing_need_no_other_copy_of_it():
    module = ByABuffer().eval()
    module.names = Counted()
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64, 128, 256], spec, backend="tape")
    encoder(rows_for([250]), lengths=[250])
    for rows in (60, 120):
        before = Counted.copies
        encoder(rows_for([rows]), lengths=[rows])
        assert Counted.copies - before <= 2  # looks for modules that came since
    assert encoder.stats.replays.total() == 3


def test_a_buffer_that_is_loaded_behind_the_back_of_torch_reaches_earlier_and_later_graphs():
    module = ByABuffer().eval()
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(module, [64, 256], spec, backend="tape")
    encoder(rows_for([250]), lengths=[250])
    module.scale.data.mul_(3)  # which no version counts
    for rows in (60, 250):
        x = rows_for([rows])
        assert relative(encoder(x, lengths=[rows]), module(x)) < 1e-5
    assert encoder.stats.replays.total() == 3


class TurnsTwice(nn.Module):
    """Changes the sign of its output from a third call on, and from a high first value on: both together keep it."""

    third, peak = 1, torch.zeros(())

    def __init__(self):
        super().__init__()
        self.lin, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            TurnsTwice.third = -1
        TurnsTwice.peak = torch.maximum(self.peak, x[0, 0])
        return self.lin(x) * self.third * torch.where(self.peak > 0.5, -1, 1)


def test_two_changes_that_cancel_in_the_end_are_seen_in_between():
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    encoder = vg.GraphedEncoder(TurnsTwice().eval(), [64, 256], spec, backend="tape")
    x = torch.linspace(-1, 1, 40).reshape(5, 8)  # low at first, and high where a run for the capture reflects it
    with pytest.raises(vg.errors.CaptureError, match="after other calls, whatever it holds itself"):
        encoder(x, lengths=[5])
    assert encoder.stats.replays.total() == 0


class TurnsOnce(nn.Module):
    """Has another sign in its third call alone."""

    def __init__(self):
        super().__init__()
        self.lin, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.lin(x) * (-1 if self.calls == 3 else 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_so_in_one_call_alone_is_seen(ahead):
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
    module, plain = TurnsOnce().eval(), TurnsOnce().eval()
    plain.load_state_dict(module.state_dict())
    encoder = vg.GraphedEncoder(module, [64, 256], spec, backend="tape")
    with pytest.warns(UserWarning, match="another output for the same rows"):
        outputs = [(encoder.capture() if ahead else encoder)(rows_for([5]), lengths=[5])]
    calls = [[5], [40, 30], [7], [5], [9]]
    outputs += [encoder(rows_for(lengths), lengths=lengths) for lengths in calls[1:]]
    assert all(torch.equal(output, plain(rows_for(lengths))) for output, lengths in zip(outputs, calls, strict=True))
    assert encoder.stats.replays.total() == 0
