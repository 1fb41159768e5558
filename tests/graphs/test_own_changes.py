"""`Shadow` of a module that goes on changing: what it changes in its own runs after a capture, for shapes that it meets: outputs are right."""

import copy
from collections import OrderedDict, defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import varlen_graphs as vg

LENGTHS = (5, 9, 12, 7, 11, 5, 9, 6, 12, 5)


def table(length, x):
    return torch.arange(length, dtype=x.dtype)[:, None] / 7


class Slotted:
    __slots__ = ("length", "table")

    def __init__(self):
        self.length = self.table = None


class Keeping(nn.Module):
    """Adds to a linear layer what it keeps for a length."""

    def __init__(self, keep, add):
        super().__init__()
        self.linear = nn.Linear(3, 8)
        keep(self)
        self.add = add

    def forward(self, x):
        return self.add(self, self.linear(x), x.shape[-2], x)


def of_a_dict(m, y, length, x):
    if length not in m.tables:
        m.tables[length] = table(length, x)
    return y + m.tables[length]


def of_a_private_dict(m, y, length, x):
    tables = vars(m)["_tables"]
    if length not in tables:
        tables[length] = table(length, x), length
    return y + tables[length][0]


def of_a_default_dict(m, y, length, x):
    if not m.tables[length]:
        m.tables[length].append(table(length, x))
    return y + m.tables[length][0]


def of_the_last_length(m, y, length, x):
    if m.length != length:
        m.length, m.table = length, table(length, x)
    return y + m.table


def of_the_largest_length(m, y, length, x):
    if length > m.length:
        m.length, m.table = length, table(length, x)
    return y + m.table[:length]


def of_an_object(m, y, length, x):
    if m.kept is None or m.kept.length != length:
        m.kept = SimpleNamespace(length=length, table=table(length, x))
    return y + m.kept.table


def of_slots(m, y, length, x):
    if m.kept.length != length:
        m.kept.length, m.kept.table = length, table(length, x)
    return y + m.kept.table


def of_a_buffer(m, y, length, x):
    if len(m.table) < length:
        m.register_buffer("table", table(length, x), persistent=False)
    return y + m.table[:length]


def of_a_list(m, y, length, x):
    if length not in [one for one, _ in m.tables]:
        m.tables.append((length, table(length, x)))
    return y + next(kept for one, kept in m.tables if one == length)


def keeps(name, make):
    return lambda m: setattr(m, name, make())


def with_length(m):
    m.length, m.table = 0, None


def calls(keep, add, scale=lambda at: 1.0):
    """Call a wrapped module, and compare it with a copy of its own."""
    torch.manual_seed(0)
    module = Keeping(keep, add).eval()
    own = copy.deepcopy(module)
    vg.wrap(module, backend="tape")
    with torch.no_grad():
        for at, length in enumerate(LENGTHS):
            x = torch.randn(2, length, 3) * scale(at)
            torch.testing.assert_close(module(x), own(x))


def of_the_newest(m, y, length, x):
    return of_a_dict(m, y, length, x) * max(m.tables)


def of_the_number(m, y, length, x):
    return of_a_dict(m, y, length, x) + len(m.tables)


def of_the_largest_value(m, y, length, x):
    """The largest number of the first call of each length limits all outputs: few calls show it."""
    if length not in m.tables:
        m.tables[length] = x.abs().max()
    return y.clamp(max=torch.stack([*m.tables.values()]).max())


def of_the_largest_ever(m, y, length, x):
    """As rotary embeddings whose base depends on the longest text."""
    if length > m.length:
        m.length = length
    return y * m.length


def of_the_order(m, y, length, x):
    if length not in m.tables:
        m.tables.append(length)
    return y * m.tables.index(length) + m.tables[-1]


def of_a_set(m, y, length, x):
    m.tables.add(length)
    return y * len(m.tables)


KEEPS = {
    "a dict": (keeps("tables", dict), of_a_dict),
    "an ordered dict": (keeps("tables", OrderedDict), of_a_dict),
    "a private dict": (keeps("_tables", dict), of_a_private_dict),
    "a dict of lists": (keeps("tables", lambda: defaultdict(list)), of_a_default_dict),
    "attributes, for the last length": (with_length, of_the_last_length),
    "attributes, for the largest length": (with_length, of_the_largest_length),
    "an object that is replaced": (keeps("kept", lambda: None), of_an_object),
    "an object with slots": (keeps("kept", Slotted), of_slots),
    "a buffer": (lambda m: m.register_buffer("table", torch.zeros(0, 1), persistent=False), of_a_buffer),
    "a list": (keeps("tables", list), of_a_list),
    "the newest": (keeps("tables", dict), of_the_newest),
    "the number": (keeps("tables", dict), of_the_number),
    "the largest value": (keeps("tables", dict), of_the_largest_value),
    "the largest ever": (with_length, of_the_largest_ever),
    "the order": (keeps("tables", list), of_the_order),
    "a set": (keeps("tables", set), of_a_set),
}


@pytest.mark.parametrize(("keep", "add"), KEEPS.values(), ids=KEEPS.keys())
def test_outputs_are_right_whatever_other_shapes_leave(keep, add):
    calls(keep, add)


@pytest.mark.parametrize("scale", [lambda at: 1.0 + at, lambda at: 10.0 - at], ids=["up", "down"])
@pytest.mark.parametrize("name", ["a dict", "the largest value", "the largest ever"])
def test_outputs_are_right_where_rows_grow_or_shrink(name, scale):
    calls(*KEEPS[name], scale)


def test_what_others_change_meanwhile_is_found():
    """A change from outside between the module's own change and the next call."""
    torch.manual_seed(0)
    module = Keeping(keeps("tables", dict), lambda m, *call: of_a_dict(m, *call) * m.scale).eval()
    module.scale = 1.0
    own = copy.deepcopy(module)
    vg.wrap(module, backend="tape")
    with torch.no_grad():
        for at, length in enumerate(LENGTHS[:4]):
            x = torch.randn(2, length, 3)
            torch.testing.assert_close(module(x), own(x))
            module.scale = own.scale = 2.0 + (at == 2)
        for length in LENGTHS:
            x = torch.randn(2, length, 3)
            torch.testing.assert_close(module(x), own(x))


def test_an_entry_that_was_added_and_is_replaced_from_outside_is_found():
    torch.manual_seed(0)
    module = Keeping(keeps("factors", dict), lambda m, y, length, x: y * m.factors.setdefault(length, 1.0 + length))
    own = copy.deepcopy(module.eval())
    vg.wrap(module, backend="tape")
    with torch.no_grad():
        for length in (5, 9, 5, 9):
            x = torch.randn(2, length, 3)
            torch.testing.assert_close(module(x), own(x))
        for one in (module, own):
            one.factors[9] = 20.0
        for length in (9, 5, 9):
            x = torch.randn(2, length, 3)
            torch.testing.assert_close(module(x), own(x))
