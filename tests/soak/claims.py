"""Random wrong declarations of modules that are right: a case, and what is changed in its declaration."""

from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.soak.cases import Case, Encoder, cases, shares
from tests.soak.itself import Itself, kind_of, without_buffers

WINDOWS = [vg.layouts.Windows(side) for side in (1, 2, 3, 5)]

VALUES = {
    "per": ["item", "frame", "clip", "group", *WINDOWS],
    "order": ["raster", "merge_block", *WINDOWS],
    "axes": [("h", "w"), ("w", "h"), ("t", "w"), ("row",), ("h",), ("t",)],
    "windows": WINDOWS,
    "inverse": [False, True],
    "mode": ["bilinear", "bicubic"],
    "align_corners": [False, True],
    "antialias": [False, True],
    "accum_dtype": [torch.float16, None],
    "largest": [4, 12],
    "heads": [1],
    "head_dim": [8],
    "queries": [1, 3],
    "real": [False],
    "causal": [False],
    "window": [(1, 1), (4, -1)],
    "any_segments": [False, True],
}
"""What fields of buffers are changed to; for functions see `FUNCTIONS`."""


INPUTS = [vg.inputs.PerRow, vg.inputs.PerItem, vg.inputs.PerCall]

OF_INPUTS = {
    "per_row": [False, True],
    "shape": [(), (1,), (2, 16)],
    "dtype": [torch.float16, torch.int64],
    "default": [0.0, 1.0],
    "pad": [7],
    "rows_dim": [1],
}
"""What kinds and fields of the tensors beside the rows are changed to."""


@dataclass(frozen=True)
class Change:
    """One change of a declaration.

    Attributes:
        of: A buffer, an output or an argument by its name; `"windows"`, for all windows; `"forward"`; or `"promise"`,
            for `min_segment_rows`.
        field: What is changed of it; `"dropped"` leaves out a buffer, and the forward does without it; `"uncounted"`
            hides from budgets that it uses segments.
        value: What it is changed to.
    """

    of: str
    field: str
    value: object = None


@dataclass(frozen=True)
class Claim:
    """A declaration of a case that may be wrong.

    Attributes:
        case: What the module computes, and how it is called.
        changes: Where the declaration differs.
        inside: Whether the module itself takes the buffers; if not, a function that runs in its place does.
        strict: Whether the module refuses items that are larger, or numbers that are lower, than calls bring.
    """

    case: Case
    changes: tuple[Change, ...]
    inside: bool = False
    strict: bool = False

    def spec(self):
        """The changed declaration."""
        spec = self.case.spec()
        rows, layout, outputs = spec.row_input, spec.layout, dict(spec.outputs.fields)
        buffers = {buffer.name: buffer for buffer in spec.buffers}
        inputs = {one.name: one for one in spec.inputs}
        for change in self.changes:
            new = {change.field: change.value}
            if change.of == "windows":
                buffers = {name: with_windows(buffer, change.value) for name, buffer in buffers.items()}
                continue
            if change.field == "dropped":
                del buffers[change.of]
            elif change.field == "uncounted":
                buffers[change.of] = vg.buffers.DeviceBuffer(
                    change.of, partial(buffers[change.of].produce, module=None), any_segments=False
                )
            elif change.field == "function":
                buffers[change.of] = replace(
                    buffers[change.of], function=functions_of(buffers[change.of])[change.value]
                )
            elif change.of in buffers:
                buffers[change.of] = replace(buffers[change.of], **new)
            elif change.of in inputs:
                own = inputs[change.of]
                inputs[change.of] = change.value(own.name, own.shape) if change.field == "kind" else replace(own, **new)
            elif change.of in outputs:
                outputs[change.of] = change.value
            elif change.of == "x":
                rows = replace(rows, **new)
            elif change.field == "type":
                layout = LAYOUTS[change.value]("layout", columns=layout.columns)
            elif change.of == "layout":
                layout = replace(layout, **new)
            elif change.of == "kind":
                columns = [replace(column, **new) for column in layout.columns]
                layout = replace(layout, columns=tuple(columns))
        return vg.BufferSpec(rows, layout, [*buffers.values()], vg.outputs.Fields(**outputs), [*inputs.values()])

    def encoder(self, device):
        """An encoder of the module with the changed declaration."""
        changed = {change.of: change.value for change in self.changes}
        factor, promise = changed.get("forward", 1), changed.get("promise", 1)

        def forward(module, x, layout, kind=None, real=None, flip=False, **buffers):
            output = Encoder.forward(module, module.cast(x), flip, **without_buffers(module.case, x) | buffers)
            return {name: factor * tensor for name, tensor in output.items()}

        return vg.GraphedEncoder(
            Itself(self.case, self.strict).to(device).eval(),
            self.case.budgets,
            self.spec(),
            forward=None if self.inside else forward,
            backend="cuda" if device == "cuda" else "tape",
            layouts=vg.options.GpuLayouts(min_segment_rows=promise, simulated=True),
        )


def with_windows(buffer, windows):
    """A buffer with all its windows replaced."""
    own = [field.name for field in fields(buffer) if isinstance(getattr(buffer, field.name), vg.layouts.Windows)]
    return replace(buffer, **dict.fromkeys(own, windows))


def on_rows(of_items):
    """A function of a `DeviceBuffer` that gives each row a number of its item."""

    def function(table):
        scales = of_items(table)
        return scales[:, None] if table.layout.padded else scales[table.row_item]

    return function


FUNCTIONS = {
    "scale": {
        "of the rows": on_rows(lambda table: 8 / (table.item_rows + 8)),
        "of a frame": on_rows(lambda table: 8 / (table.h * table.w + 8)),
        "of a line": on_rows(lambda table: 8 / (table.w + 8)),
        "of the last column": on_rows(lambda table: table.values[:, -1] / 8 + 1),
        "of the largest": on_rows(lambda table: 8 / (table.item_rows.max() + 8 + 0 * table.t)),
        "of few rows": on_rows(lambda table: 8 / (table.item_rows.clamp(max=30) + 8)),
        "of a small column": on_rows(lambda table: table.values[:, -1].clamp(0, 1) / 8 + 1),
        "none": on_rows(lambda table: torch.ones_like(table.t).float()),
    },
    "item": {
        "the first": lambda table: 0 * table.row_item,
        "the next": lambda table: (table.row_item + 1) % table.budget.items,
    },
    "shares": {"a sum": lambda table: shares(table).gt(0).float()},
    "host": {
        "of other rows": lambda layout: repeated(layout, [1 + rows % 2 for rows in layout.rows]),
        "of the items": lambda layout: repeated(layout, [1 + len(layout)] * len(layout)),
        "of a frame": lambda layout: repeated(layout, [1 + h * w % 3 for _, h, w, *_ in layout.items]),
    },
}
"""What the functions of buffers are changed to, by the beginnings of their names, those of the host apart."""


def repeated(layout, of_items):
    """A number of its item for each row."""
    return torch.tensor(of_items).repeat_interleave(torch.tensor(layout.rows)).float()


def functions_of(buffer):
    """What the function of a buffer may be changed to, by name."""
    if not hasattr(buffer, "function"):
        return {}
    return FUNCTIONS["host" if isinstance(buffer, vg.buffers.HostBuffer) else kind_of(buffer.name)]


LAYOUTS = {
    "GridTHW": vg.GridTHW,
    "GridHW": vg.layouts.GridHW,
    "Lengths": vg.Lengths,
    "PaddedLengths": partial(vg.Lengths, padded=True),
    "Mask": vg.Mask,
}

EXTENTS = [
    vg.outputs.Rows(),
    vg.outputs.Rows(2),
    vg.outputs.Rows(3),
    vg.outputs.Rows(4),
    vg.outputs.Rows(rows_dim=1),
    vg.outputs.Items(),
    vg.outputs.Items(2),
    vg.outputs.Items(rows_dim=1),
    vg.outputs.Groups(),
    vg.outputs.FrameRows(),
    vg.outputs.FrameRows(4),
]


def changes_of(case):
    """All changes of a declaration, those of buffers apart."""
    spec = case.spec()
    of_buffers = [
        Change(buffer.name, field.name, value)
        for buffer in spec.buffers
        for field in fields(buffer)
        for value in VALUES.get(field.name, [])
        if getattr(buffer, field.name) != value
    ]
    of_buffers += [Change(buffer.name, "function", name) for buffer in spec.buffers for name in functions_of(buffer)]
    of_buffers += [Change(one.name, "kind", kind) for one in spec.inputs for kind in INPUTS if type(one) is not kind]
    of_buffers += [
        Change(one.name, field.name, value)
        for one in spec.inputs
        for field in fields(one)
        for value in OF_INPUTS.get(field.name, [])
        if getattr(one, field.name) != value
    ]
    of_buffers += [Change(buffer.name, "uncounted") for buffer in spec.segmented]
    if any(isinstance(getattr(part, "per", None), vg.layouts.Windows) for part in case.parts):
        of_buffers += [Change("windows", "side", windows) for windows in WINDOWS]
    of_buffers += [Change(buffer.name, "dropped") for buffer in spec.buffers if buffer.name != "shares"]
    others = [Change(name, "extent", extent) for name in case.outputs for extent in EXTENTS]
    others += [Change("x", "pad", pad) for pad in (0, 7, TOKEN_TOO_LARGE)]
    others += [Change("x", "dtype", dtype) for dtype in (torch.float64, torch.float16, torch.int64, torch.int32)]
    others += [Change("x", "rows_dim", 1 - case.rows_dim), Change("forward", "factor", 1.01)]
    others += [Change("layout", "merge", merge) for merge in (1, 2, 3) if case.layout == "grid" and merge != case.merge]
    others += [Change("layout", "type", kind) for kind in LAYOUTS]
    others += [Change("layout", "columns", ())] * (case.column != "none")
    others += [Change("kind", "pad", 2), Change("kind", "default", 4)] * (case.column != "none")
    others += [Change("promise", "min_segment_rows", rows) for rows in (4, 30)]
    return of_buffers, others


TOKEN_TOO_LARGE = 99


@st.composite
def claims(draw):
    """A right module with one to three changes of its declaration."""
    case = draw(cases().filter(lambda case: case.parts))
    few = {
        "parts": case.parts[:3],
        "budgets": case.budgets[:2],
        "calls": case.calls[:2],
    }  # so that there are many cases
    case = replace(case, rows=case.rows.replace("bytes", "floats"), promised=False, **few)
    of_buffers, others = changes_of(case)
    some = st.sampled_from(others)
    one = st.one_of(st.sampled_from(of_buffers), st.sampled_from(of_buffers), some) if of_buffers else some
    changes = draw(st.lists(one, min_size=1, max_size=3, unique_by=lambda change: (change.of, "dropped")))
    return Claim(case, tuple(changes), draw(st.booleans()) and bool(of_buffers), draw(st.booleans()))
