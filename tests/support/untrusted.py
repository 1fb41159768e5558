"""Layouts as an attacker may send them, and encoders of every kind of layout to send them to."""

import math
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import SIMULATED
from tests.support.segments import relative
from tests.support.towers import equal_bits

DIM, ROWS = 8, 12


class Encoder(nn.Module):
    """Rows mix in segments, and take in the column of their item."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x, cu_seqlens, max_seqlen, scale=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, DIM)).unbind(1)
        mixed = vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)
        return x + (mixed if scale is None else mixed * scale[:, None])


class Padded(nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(DIM, DIM)

    def forward(self, x, layout):
        return super().forward(x)


@dataclass(frozen=True)
class Target:
    """An encoder, a good call of it, and what that gives."""

    encoder: vg.GraphedEncoder
    rows: torch.Tensor
    good: dict[str, Any]
    expected: torch.Tensor


LAYOUTS = {
    "grid": (lambda: vg.GridTHW("layout", merge=2), {"layout": [(1, 2, 2), (2, 2, 2)]}),
    "sizes": (lambda: vg.layouts.GridHW("layout"), {"layout": [(2, 2), (2, 4)]}),
    "lengths": (lambda: vg.Lengths("layout"), {"layout": [5, 7]}),
    "column": (lambda: vg.Lengths("layout", (vg.layouts.Column("kind"),)), {"layout": [5, 7], "kind": [1, -2]}),
    "optional": (
        lambda: vg.Lengths("layout", (vg.layouts.Column("kind", default=3),)),
        {"layout": [5, 7], "kind": [1, None]},
    ),
    "nested": (
        lambda: vg.Lengths("layout", (vg.layouts.NestedColumn("kind"),)),
        {"layout": [5, 3, 4], "kind": [[1, 2], [3]]},
    ),
    "mask": (lambda: vg.Mask("layout"), {"layout": [[1] * 5 + [0], [1] * 6]}),
    "padded_lengths": (lambda: vg.Lengths("layout", padded=True), {"layout": [5, 6]}),
    "batch_to_pack": (lambda: vg.Lengths("layout"), {"layout": [5, 6], "real": [[1] * 5 + [0], [1] * 6]}),
}
"""A declaration and a good call for each kind of layout; both arguments of a call may be attacked."""

ON_DEVICE = ["grid", "sizes", "lengths", "column"]
"""Kinds of layouts whose tensors go into the item table unread."""

ATTACKED = [(name, argument) for name, (_, good) in LAYOUTS.items() for argument in good]

NEARLY = {
    "a side that the merge size does not divide": ("grid", [(1, 1, 12)]),
    "a frame of nothing beside others": ("grid", [(0, 2, 2), (3, 2, 2)]),
    "two negative sides": ("sizes", [(-3, -4)]),
    "a product that is right in 32 bits": ("grid", [(2**30 + 3, 2, 2)]),
    "a product that is right in 64 bits": ("grid", [(2**62 + 3, 2, 2)]),
    "a product of two that is": ("sizes", [(2**62 + 3, 4)]),
    "a sum that is": ("lengths", [2**63 - 1, 2**63 - 1, 14]),
    "a sum with what is negative": ("lengths", [20, -8]),
}
"""Layouts that describe as many rows as came, if one counts carelessly."""


@cache
def target(name, device):
    make, good = LAYOUTS[name]
    layout = make()
    batched = layout.padded or "real" in good
    rows = torch.randn(*((2, 6) if batched else (ROWS,)), DIM, generator=torch.Generator().manual_seed(0)).to(device)
    buffers = (
        []
        if layout.padded
        else [vg.buffers.CuSeqlens(per="frame" if layout.has_frames else "item"), vg.buffers.MaxSeqlen()]
    )
    if layout.has_frames:
        buffers[1] = vg.buffers.MaxSeqlen(per="frame")
    if layout.columns:
        buffers.append(
            vg.buffers.DeviceBuffer(
                "scale", lambda table: 1 / (2 + table.column("kind")[table.row_item].float().tanh())
            )
        )
    packed = vg.inputs.Rows("x", (DIM,), padded_by="real" if "real" in good else None)
    encoder = vg.GraphedEncoder(
        (Padded() if layout.padded else Encoder()).to(device),
        [vg.budgets.Budget.padded(4, 8)] if layout.padded else [vg.budgets.Budget(64, items=16, segments=16)],
        vg.BufferSpec(packed, layout, buffers),
        **({"backend": "cuda"} if device == "cuda" else SIMULATED),
    )
    return Target(encoder, rows, good, encoder.capture()(rows, **good))


def attack(name, arguments, device="cpu"):
    """Make one call with some arguments that may be wrong, and a good one after it.

    What is wrong is refused by an error of the library's own that is no longer than a paragraph: at once, or, where
    only the device has seen the items, by NaN and an error at the next look.
    """
    attacked = target(name, device)
    encoder, output = attacked.encoder, None
    try:
        output = encoder(attacked.rows, **attacked.good | arguments)
        encoder.check()
        assert output.isfinite().all()
        assert output.shape == attacked.rows.shape
        assert is_legal(name, (attacked.good | arguments)["layout"])
    except vg.errors.VarlenGraphsError as error:
        assert len(str(error)) < 1500  # noqa: PT017 - not every value is wrong
        assert output is None or output.isnan().all()
    assert equal_bits(encoder(attacked.rows, **attacked.good), attacked.expected)
    if name in ON_DEVICE:  # the same of items that the host does not look at
        unseen = {argument: torch.tensor(value, device=device) for argument, value in attacked.good.items()}
        assert relative(encoder(attacked.rows, **unseen), attacked.expected) < 1e-3


def is_legal(name, layout):
    """Return True if a layout of the right form describes the rows of the call."""
    layout = layout.tolist() if hasattr(layout, "tolist") else layout
    if name == "mask":
        return all(sorted(marks, reverse=True) == [*marks] and len(marks) == 6 for marks in layout)
    items = [item if isinstance(item, list | tuple) else [item] for item in layout]
    sound = all(side >= 0 for item in items for side in item)
    if name in ("padded_lengths", "batch_to_pack"):
        return sound and len(items) == 2 and all(length <= 6 for (length,) in items)
    merged = name != "grid" or all(h % 2 == w % 2 == 0 for _, h, w in items)
    return sound and merged and sum(math.prod(item) for item in items) == ROWS


EDGES = [
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    *(sign * (2**bits + more) for bits in (7, 15, 31, 32, 62, 63, 64) for sign in (1, -1) for more in (-1, 0, 1)),
]
"""Integers at which something overflows, or that make sense."""

integers = st.sampled_from(EDGES) | st.integers(-3, 13) | st.integers()
scalars = st.one_of(
    integers, integers, st.none(), st.booleans(), st.floats(), st.text(max_size=9), st.binary(max_size=9), st.complex_numbers(),
    integers.map(lambda n: numpy.int64(n % 2**63)), integers.map(lambda n: torch.tensor(n % 2**63)),
)  # fmt: skip


@st.composite
def arrays(draw):
    """Arrays and tensors of any dtype and of few dimensions, that may be sparse, without memory, or not contiguous."""
    shape = draw(
        st.sampled_from([(1, 3), (2, 3), (1, 2), (2, 2), (2,), (3,), (1,), (), (0,), (0, 3), (3, 0), (2, 6), (1, 2, 3)])
    )
    of_int64 = st.integers(-(2**63), 2**63 - 1)
    count = math.prod(shape)
    edges = st.sampled_from([edge for edge in EDGES if abs(edge) < 2**63]) | of_int64
    values = numpy.array(draw(st.lists(edges, min_size=count, max_size=count)), dtype=numpy.int64).reshape(shape)
    if draw(st.booleans()):
        with numpy.errstate(all="ignore"):
            return values.astype(draw(st.sampled_from([*"bhilBHILfd?FDO", "U21", "datetime64[s]"])))
    tensor = torch.from_numpy(values).to(draw(st.sampled_from(DTYPES)))
    forms = [
        lambda t: t,
        lambda t: t,
        lambda t: t.to("meta"),
        lambda t: t.to_sparse(),
        lambda t: t.T if t.dim() == 2 else t,
    ]
    try:
        return draw(st.sampled_from(forms))(tensor)
    except (RuntimeError, NotImplementedError):  # no such form of such a dtype
        return tensor


DTYPES = [
    torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip


@st.composite
def nearly(draw, good):
    """A good value, changed in a few places, as lists or tuples or a tensor."""
    value = deepcopy(good)
    for _ in range(draw(st.integers(0, 2))):
        value = _changed(draw, value)
    forms = [lambda v: v, tuple, numpy.array, torch.as_tensor, lambda v: torch.as_tensor(v, dtype=torch.int32)]
    try:
        return draw(st.sampled_from(forms))(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # not of all values
        return value


def _changed(draw, value):
    if not isinstance(value, list | tuple) or not value or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from([lambda: draw(scalars), lambda: draw(scalars), lambda: [value], list]))()
    at = draw(st.integers(0, len(value) - 1))
    change = draw(st.sampled_from(["entry", "entry", "entry", "drop", "double"]))
    middle = {"entry": lambda: [_changed(draw, value[at])], "drop": list, "double": lambda: [value[at]] * 2}[change]()
    return type(value)([*value[:at], *middle, *value[at + 1 :]])


anything = arrays() | st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=12,
)


@st.composite
def attacks(draw):
    """A kind of layout, and an argument of a call that is anything, more often than not nearly right."""
    name, argument = draw(st.sampled_from(ATTACKED))
    good = LAYOUTS[name][1][argument]
    return name, {argument: draw(st.one_of(nearly(good), nearly(good), anything))}


@st.composite
def device_attacks(draw):
    """A kind of layout, and tensors that go into its item table without a look at them."""
    name = draw(st.sampled_from(ON_DEVICE))
    sides = {"grid": 3, "sizes": 2}.get(name, 1)
    edges = st.sampled_from([edge for edge in EDGES if -(2**63) <= edge < 2**63]) | st.integers(0, 9)
    items = draw(st.lists(st.lists(edges, min_size=sides, max_size=sides), min_size=1, max_size=6))
    if draw(st.booleans()):  # with as many rows as come, so that only something else can be wrong
        items = draw(
            st.lists(st.lists(st.sampled_from([1, 2, 1, 2, 3, 0]), min_size=sides, max_size=sides), max_size=3)
        )
        rest = ROWS - sum(map(math.prod, items))
        last = draw(st.sampled_from([[1, 1, rest], [1, 2, rest // 2], [rest // 4, 2, 2], [-1, -1, rest]]))
        items.append(last[-sides:] if sides < 3 else last)
    dtype = draw(st.sampled_from([torch.int64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint64]))
    layout = torch.tensor(items).to(dtype)
    arguments = {"layout": layout if sides > 1 else layout.squeeze(1)}
    if name == "column":
        arguments["kind"] = torch.tensor(draw(st.lists(edges, min_size=len(items), max_size=len(items))))
    return name, arguments
