"""Random encoders of modules that keep something between calls: what they keep of a call, how, where, and what for."""

import collections
import dataclasses
import types
from dataclasses import dataclass

import numpy
import torch
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.soak.check import TOLERANCE
from tests.support.segments import boundaries, relative

DIM = 8

READS = {
    "nothing": lambda x, longest: 1,
    "rows": lambda x, longest: len(x),
    "longest item": lambda x, longest: longest,
    "an odd number": lambda x, longest: len(x) % 2,
    "the first value": lambda x, longest: x[0, 0],
    "the first row": lambda x, longest: x[0],
    "the mean": lambda x, longest: x.mean(),
    "the mean row": lambda x, longest: x.mean(0),
    "the peak": lambda x, longest: x.abs().amax(),
    "a number of the host": lambda x, longest: x[0, 0].item(),
}
"""What is read of a call, by name: Python numbers, and tensors of one or `DIM` numbers."""

RULES = {
    "replace": lambda kept, new: new * 1,
    "sum": lambda kept, new: kept + new,
    "average": lambda kept, new: (kept + new) / 2,
    "largest": lambda kept, new: largest(kept, new),
    "decay": lambda kept, new: kept * 0.5 + 1,
    "toggle": lambda kept, new: 1 - kept,
}
"""What is kept, of what was kept and what is new."""

MOMENTS = {
    "always": lambda calls, x: True,
    "once": lambda calls, x: calls == 1,
    "in the third call": lambda calls, x: calls == 3,
    "from the fifth call": lambda calls, x: calls >= 5,
    "of long calls": lambda calls, x: len(x) > 48,
    "of short calls": lambda calls, x: len(x) < 12,
}
"""When something is kept: by the number of the call, which the module counts as well, and by its rows."""

USES = {
    "not": lambda y, kept: y,
    "factor": lambda y, kept: y * (1 + kept / 64),
    "offset": lambda y, kept: y + kept / 8,
    "branch": lambda y, kept: y if kept is None or (kept > 40 if not is_row(kept) else kept[0] > 0) else -y,
    "selection": lambda y, kept: torch.where(torch.as_tensor(kept, device=y.device) > 0.5, y, -y),
}
"""What becomes of the output."""


def largest(kept, new):
    if isinstance(kept, torch.Tensor) or isinstance(new, torch.Tensor):
        return torch.maximum(torch.as_tensor(kept).to(torch.float32), torch.as_tensor(new).to(torch.float32))
    return max(kept, new)


def is_row(kept):
    return isinstance(kept, torch.Tensor) and kept.dim() > 0


# Where something is kept: each function returns what reads it and what writes it, and gives the module what it needs.


def in_an_attribute(module, name):
    setattr(module, name, 0)
    return lambda own: getattr(own, name), lambda own, value: setattr(own, name, value)


def in_a_buffer(module, name):
    module.register_buffer(name, torch.zeros(DIM))

    def write(own, value):
        getattr(own, name).copy_(torch.as_tensor(value, dtype=torch.float32))

    return lambda own: getattr(own, name), write


def in_a_replaced_buffer(module, name):
    module.register_buffer(name, torch.zeros(()))

    def write(own, value):
        setattr(own, name, torch.as_tensor(value, dtype=torch.float32, device=own.lin.weight.device) * 1)

    return lambda own: getattr(own, name), write


def in_a_container(made, at):
    def keep(module, name):
        setattr(module, name, made())

        def write(own, value):
            getattr(own, name)[at] = value

        return lambda own: getattr(own, name)[at], write

    return keep


def at_the_end_of_a_container(made):
    def keep(module, name):
        setattr(module, name, made())
        return lambda own: getattr(own, name)[-1], lambda own, value: getattr(own, name).append(value)

    return keep


def by_length(module, name):
    """A dict of which calls of one length share an entry."""
    setattr(module, name, {})

    def write(own, value):
        getattr(own, name)[own.rows // 48] = value

    return lambda own: getattr(own, name).get(own.rows // 48, 0), write


class Helper:
    value = 0


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0


@dataclasses.dataclass
class Kept:
    value: object = 0


def in_an_object(made):
    def keep(module, name):
        setattr(module, name, made())

        def write(own, value):
            getattr(own, name).value = value

        return lambda own: getattr(own, name).value, write

    return keep


def in_a_closure(module, name):
    kept = 0

    def read():
        return kept

    def write(value):
        nonlocal kept
        kept = value

    setattr(module, name, (read, write))
    return lambda own: getattr(own, name)[0](), lambda own, value: getattr(own, name)[1](value)


def in_an_array(module, name):
    setattr(module, name, numpy.zeros(1))

    def write(own, value):
        getattr(own, name)[0] = value.flatten()[0].item() if isinstance(value, torch.Tensor) else value

    return lambda own: float(getattr(own, name)[0]), write


def in_the_class(module, name):
    setattr(type(module), name, 0)
    return lambda own: getattr(own, name), lambda own, value: setattr(type(own), name, value)


def in_a_global(module, name):
    namespace = {"kept": 0}
    exec("def read():\n    return kept\ndef write(value):\n    global kept\n    kept = value", namespace)
    read, write = namespace["read"], namespace["write"]
    return lambda own: read(), lambda own, value: write(value)


PLACES = {
    "attribute": in_an_attribute,
    "buffer": in_a_buffer,
    "replaced buffer": in_a_replaced_buffer,
    "list": in_a_container(lambda: [0], 0),
    "dict": in_a_container(lambda: {"kept": 0}, "kept"),
    "dict by length": by_length,
    "history": at_the_end_of_a_container(lambda: [0]),
    "deque": at_the_end_of_a_container(lambda: collections.deque([0], maxlen=2)),
    "namespace": in_an_object(lambda: types.SimpleNamespace(value=0)),
    "object": in_an_object(Helper),
    "slots": in_an_object(Slotted),
    "dataclass": in_an_object(Kept),
    "closure": in_a_closure,
    "array": in_an_array,
    "class": in_the_class,
    "global": in_a_global,
}


@dataclass(frozen=True)
class Fault:
    """One thing that a module keeps.

    Attributes:
        read: What of a call.
        rule: What is kept of it.
        moment: When.
        place: Where.
        use: What for.
        before: Whether it is used before the call is kept, so that it tells of calls before this one.
    """

    read: str
    rule: str
    moment: str
    place: str
    use: str
    before: bool = False


@dataclass(frozen=True)
class KeepingCase:
    """A module that keeps something, and calls of it.

    Attributes:
        faults: What it keeps.
        calls: The lengths of the items of each call.
        start: `"cold"`, `"captured"`, or `"used"`: after a call of the module itself.
        counts: Whether the module counts its calls, in an attribute; if not, all calls are its first.
    """

    faults: tuple[Fault, ...]
    calls: tuple[tuple[int, ...], ...]
    start: str = "cold"
    counts: bool = True

    def module(self, device):
        """A module of a class of its own, always the same."""
        torch.manual_seed(0)
        faults, counts = self.faults, self.counts
        by_length = any(fault.place == "dict by length" for fault in faults)

        class Module(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin, self.number, self.rows = nn.Linear(DIM, DIM), 0, 0

            def forward(self, x, cu_seqlens, max_seqlen):
                if counts:
                    self.number += 1
                if by_length:
                    self.rows = len(x)
                y = self.lin(x)
                for fault, (read, write) in zip(faults, accesses, strict=True):
                    kept = read(self)
                    if MOMENTS[fault.moment](self.number or 1, x):
                        write(self, RULES[fault.rule](kept, READS[fault.read](x, max_seqlen)))
                    y = USES[fault.use](y, kept if fault.before else read(self))
                return y

        module = Module()
        accesses = [PLACES[fault.place](module, f"kept_{at}") for at, fault in enumerate(faults)]
        return module.to(device).eval()


def rows_of(lengths, number, device):
    generator = torch.Generator().manual_seed(number % 4)
    return torch.randn(sum(lengths), DIM, generator=generator).to(device)


def check_keeping_case(case, device="cpu"):
    """Make the calls of a case: each must be refused, or be what the module itself gives after the same calls.

    Returns:
        What the encoder counted.

    Raises:
        AssertionError: A call gave something else without a word.
    """
    module, plain = case.module(device), case.module(device)

    def expected(lengths, number, of=plain):
        return of(rows_of(lengths, number, device), boundaries(lengths, device=device), max(lengths))

    if case.start == "used":
        expected((20,), 0), expected((20,), 0, module)
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", shape=(DIM,)), vg.Lengths(), [vg.buffers.CuSeqlens(), vg.buffers.MaxSeqlen()]
    )
    encoder = vg.GraphedEncoder(module, [64, 256], spec, backend="cuda" if device == "cuda" else "tape")
    try:
        if case.start == "captured":
            encoder.capture()
        for number, lengths in enumerate(case.calls):
            replays = encoder.stats.replays.total()
            got, right = encoder(rows_of(lengths, number, device), lengths=list(lengths)), expected(lengths, number)
            if encoder.stats.replays.total() == replays and any(
                one.place in ("class", "global") for one in case.faults
            ):
                break  # what runs on copies of the module wrote there is not undone
            error = relative(got, right)
            assert error < TOLERANCE[device] or not right.isfinite().all(), (number, lengths, error)
    except vg.errors.VarlenGraphsError:
        pass  # refused: whether the module ran is not known, so what comes after is no call to compare
    return encoder.stats


LENGTHS = [(5,), (40,), (150,), (3, 4), (40, 30), (3, 20, 9), (64,), (200,), (7,), (12, 100)]


@st.composite
def keeping_cases(draw):
    """One to three things that a module keeps, and five to nine calls."""
    names = [st.sampled_from(sorted(one)) for one in (READS, RULES, MOMENTS, PLACES, USES)]
    faults = draw(st.lists(st.builds(Fault, *names, st.booleans()), min_size=1, max_size=3))
    calls = draw(st.lists(st.sampled_from(LENGTHS), min_size=5, max_size=9))
    start = draw(st.sampled_from(["cold", "captured", "used"]))
    return KeepingCase(tuple(faults), tuple(calls), start, draw(st.booleans()))
