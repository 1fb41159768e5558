"""Random encoders, as descriptions: declarations, budgets and calls that fit each other, drawn by hypothesis."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy
import torch
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.soak import parts
from tests.soak.flaws import FLAWS, Flaw

TOKENS, BYTES = 50, 12
PADDED = ("mask", "padded_lengths")
BATCHED = (*PADDED, "batch_to_pack")


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        items: `(t, h, w)` each.
        kinds: The column `kind`, where it is declared: an integer an item, or tuples of them, one a group.
        form: How the items come: `"list"`, `"tensor"`, `"array"`, or by a `"stage"`.
        more: By how much a padded batch is longer than its longest item.
        flip: A static argument.
        seed: Of the rows.
    """

    items: tuple[tuple[int, int, int], ...]
    kinds: tuple = ()
    form: str = "list"
    more: int = 0
    flip: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """An encoder, and calls of it.

    Attributes:
        layout: `"grid"`, `"sizes"`, `"lengths"`; of padded batches `"mask"`, `"padded_lengths"`, and `"batch_to_pack"`.
        merge: The merge size of a grid.
        every: The ratio of the output `"merged"`; every item has a multiple of so many rows.
        rows: `"floats"`, `"tokens"`, or `"bytes"` that are normalised.
        rows_dim: Where rows lie in the argument.
        column: `"none"`, `"plain"`, `"optional"` or `"nested"`.
        parts: What the encoder is made of.
        outputs: Some of `"rows"`, `"merged"` and `"pooled"`.
        promised: Whether `min_segment_rows` says how many rows the segments of all calls have.
        budgets: Of the encoder.
        calls: In their order.
    """

    layout: str
    budgets: tuple[vg.budgets.Budget, ...]
    calls: tuple[Call, ...]
    merge: int = 1
    every: int = 1
    rows: str = "floats"
    rows_dim: int = 0
    column: str = "none"
    parts: tuple = ()
    outputs: tuple[str, ...] = ("rows",)
    promised: bool = False

    def spec(self):
        """The declaration."""
        columns = {
            "none": (),
            "plain": (vg.layouts.Column("kind", pad=-3),),
            "optional": (vg.layouts.Column("kind", default=5),),
            "nested": (vg.layouts.NestedColumn("kind", default=5),),
        }[self.column]
        layout = {
            "grid": lambda: vg.GridTHW("layout", merge=self.merge, columns=columns),
            "sizes": lambda: vg.layouts.GridHW("layout", columns=columns),
            "lengths": lambda: vg.Lengths("layout", columns=columns),
            "mask": lambda: vg.Mask("layout", dtype=torch.bool, columns=columns),
            "padded_lengths": lambda: vg.Lengths("layout", columns=columns, padded=True),
            "batch_to_pack": lambda: vg.Lengths("layout", columns=columns),
        }[self.layout]()
        padded_by = "real" if self.layout == "batch_to_pack" else None
        rows = {
            "floats": lambda: vg.inputs.Rows(
                "x", (1,) * self.rows_dim + (parts.DIM,), rows_dim=self.rows_dim, padded_by=padded_by
            ),
            "tokens": lambda: vg.inputs.Rows("x", (), torch.int64, pad=3, padded_by=padded_by),
            "bytes": lambda: vg.inputs.Rows(
                "x", (BYTES,), torch.uint8, normalize=vg.inputs.Normalize([0.5] * 3, [0.3] * 3), padded_by=padded_by
            ),
        }[self.rows]()
        extents = {
            "rows": vg.outputs.Rows(rows_dim=self.rows_dim),
            "merged": vg.outputs.Rows(every=self.every),
            "pooled": vg.outputs.Items(),
        }
        buffers = [buffer for at, part in enumerate(self.parts) for buffer in part.buffers(at)]
        if "pooled" in self.outputs:
            buffers.append(vg.buffers.DeviceBuffer("shares", shares, any_segments=False))
        inputs = [one for at, part in enumerate(self.parts) for one in part.inputs(at)]
        outputs = vg.outputs.Fields(**{name: extents[name] for name in self.outputs})
        return vg.BufferSpec(rows, layout, buffers, outputs, inputs)

    def encoder(self, device, capture=vg.options.Capture()):  # noqa: B008 - frozen
        """The encoder, with weights of its own."""
        spec = self.spec()
        promise = 1
        if self.promised:
            loads = [
                spec.usage.of(vg.layouts.Layout(self.table(call), grouped=spec.layout.grouped)) for call in self.calls
            ]
            promise = min(usage.rows // max(1, usage.segments) for usage in loads)
        return vg.GraphedEncoder(
            Encoder(self).to(device).eval(),
            self.budgets,
            spec,
            backend="cuda" if device == "cuda" else "tape",
            layouts=vg.options.GpuLayouts(min_segment_rows=max(1, promise), simulated=True),
            capture=capture,
        )

    def table(self, call):
        """The items of a call with their columns, as a `Layout` has them."""
        if self.column == "none":
            return call.items
        if self.column != "nested":
            return tuple((*item, kind) for item, kind in zip(call.items, call.kinds, strict=True))
        kinds = [(kind, int(at == 0)) for group in call.kinds for at, kind in enumerate(group)]
        return tuple((*item, *kind) for item, kind in zip(call.items, kinds, strict=True))

    def units(self, call):
        """Calls of one item, or one group, each, which give the same together."""
        sizes = [len(group) for group in call.kinds] if self.column == "nested" else [1] * len(call.items)
        ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
        for at, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            yield Call(call.items[end - size : end], call.kinds[at : at + 1], flip=call.flip)

    def real_rows(self, call, device):
        """The rows of all items one after another, `[rows, ...]`."""
        generator = torch.Generator().manual_seed(call.seed)
        count = sum(map(math.prod, call.items))
        if self.rows == "tokens":
            return torch.randint(TOKENS, (count,), generator=generator).to(device)
        if self.rows == "bytes":
            return torch.randint(256, (count, BYTES), dtype=torch.uint8, generator=generator).to(device)
        return torch.randn(count, parts.DIM, generator=generator).to(device)

    def arguments(self, call, rows):
        """What a call brings, but `x`; and `x`, of such rows."""
        lengths = [math.prod(item) for item in call.items]
        longest = max(lengths) + call.more
        real = torch.arange(longest) < torch.tensor(lengths)[:, None]
        items = {
            "grid": lambda: list(call.items),
            "sizes": lambda: [item[1:] for item in call.items],
            "mask": real.tolist,
        }.get(self.layout, lambda: lengths)()
        value = {"array": numpy.array, "tensor": lambda v: torch.tensor(v, device=rows.device)}.get(call.form, list)(
            items
        )
        arguments = {"layout": value} | ({"flip": True} if call.flip else {})
        if self.column == "nested":
            arguments["kind"] = [list(group) for group in call.kinds]
        elif self.column != "none":
            as_tensor = call.form == "tensor" and None not in call.kinds
            arguments["kind"] = torch.tensor(call.kinds, device=rows.device) if as_tensor else list(call.kinds)
        if self.layout == "batch_to_pack":
            arguments["real"] = real.to(rows.device)

        def in_batch(packed):
            """Rows as calls bring them: packed, or padded with garbage."""
            if self.layout not in BATCHED:
                return packed
            garbage = math.nan if packed.is_floating_point() else 200
            batch = packed.new_full((len(lengths), longest, *packed.shape[1:]), garbage)
            batch[real.to(packed.device)] = packed
            return batch

        for at, part in enumerate(self.parts):
            for one in part.inputs(at):
                entries = part.entries(rows, lengths)
                arguments[one.name] = in_batch(entries) if isinstance(one, vg.inputs.PerRow) else entries
        x = in_batch(rows)
        return arguments, x[None] if self.rows_dim else x


class Encoder(nn.Module):
    """The module that a case describes."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(len(case.parts))
        self.case = case
        embed = {"tokens": lambda: nn.Embedding(TOKENS, parts.DIM), "bytes": lambda: nn.Linear(BYTES, parts.DIM)}
        self.embed = embed.get(case.rows, lambda: nn.Linear(parts.DIM, parts.DIM))()
        self.weights = nn.ModuleList(part.weights() for part in case.parts)

    def forward(self, x, flip=False, **buffers):
        x = self.embed(x.squeeze(0) if self.case.rows_dim else x)
        x = x.flip(-1) if flip else x
        for at, (part, weights) in enumerate(zip(self.case.parts, self.weights, strict=True)):
            x = part.run(weights, x, lambda kind, at=at: buffers[f"{kind}_{at}"])
        outputs = {
            "rows": lambda: x[None] if self.case.rows_dim else x,
            "merged": lambda: x.unflatten(0, (-1, self.case.every)).sum(1),
            "pooled": lambda: pool(x, buffers["shares"]),
        }
        return {name: outputs[name]() for name in self.case.outputs}


def shares(table):
    """What each row adds to the mean of its item: `[items, rows]`, or of a padded batch `[batch, length]`."""
    each = 1 / table.item_rows.clamp(min=1)
    if table.layout.padded:
        return torch.where(table.real_rows, each[:, None], 0.0)
    own = table.row_item == torch.arange(table.budget.items, device=table.device)[:, None]
    return torch.where(own & table.row_active, each[:, None], 0.0)


def pool(x, shares):
    if x.dim() == 3:
        return torch.where(shares[..., None] > 0, x * shares[..., None], 0).sum(1)
    return shares @ torch.where((shares > 0).any(0)[:, None], x, 0)


BOOLEANS = st.booleans()


@st.composite
def cases(draw):
    """A case whose declaration makes sense, and whose calls are legal."""
    layout = draw(st.sampled_from(["grid", "sizes", "lengths", *BATCHED]))
    merge = draw(st.integers(1, 2)) if layout == "grid" else 1
    rows_dim = draw(st.integers(0, 1)) if layout not in BATCHED else 0
    rows = draw(st.sampled_from(["floats", "tokens", "bytes"])) if rows_dim == 0 else "floats"
    column = draw(st.sampled_from(["none", "plain", "optional", *["nested"] * (layout not in PADDED)]))
    outputs = {"rows": BOOLEANS, "merged": BOOLEANS if layout not in BATCHED and not rows_dim else st.just(False)}
    outputs = tuple(name for name, wanted in outputs.items() if draw(wanted))
    outputs += ("pooled",) if not outputs or draw(BOOLEANS) else ()
    every = merge**2 if layout == "grid" else draw(st.integers(1, 3)) if "merged" in outputs else 1
    if layout == "sizes" and every == 3:
        every = 2
    windows = vg.layouts.Windows(draw(st.integers(1, 3)))
    chosen = draw(st.lists(_part(layout, merge, column, windows), max_size=4).map(tuple))
    budgets = draw(st.lists(_budget(layout), min_size=1, max_size=3, unique=True).map(tuple))
    calls = draw(st.lists(_call(layout, merge, every, column), min_size=1, max_size=4).map(tuple))
    return Case(layout, budgets, calls, merge, every, rows, rows_dim, column, chosen, outputs, draw(BOOLEANS))


@st.composite
def wrong_cases(draw):
    """A case of packed rows with a part that is wrong in a graph."""
    case = draw(cases().filter(lambda case: case.layout not in BATCHED and not case.rows_dim))
    at = draw(st.integers(0, len(case.parts)))
    flaw = draw(st.sampled_from(sorted(FLAWS)).map(Flaw))
    return replace(case, parts=(*case.parts[:at], flaw, *case.parts[at:]))


def _part(layout, merge, column, windows):
    beside = ["row", "call", *["item", "gathered"] * (layout not in PADDED)]
    plain = [st.builds(parts.Linear), st.builds(parts.Norm), st.builds(parts.Mlp)]
    plain.append(st.builds(parts.Beside, st.sampled_from(beside)))
    if column != "none":
        plain.append(st.just(parts.Scale("kind")))
    if layout in PADDED:
        return st.one_of(*plain, st.just(parts.Scale("rows")), st.builds(parts.MaskedAttention, st.booleans()))
    grid = layout in ("grid", "sizes")
    per = ["item", *(["frame", "clip", windows] if layout == "grid" else []), *["group"] * (column == "nested")]
    axes = [(), ("row",), *([("h", "w"), ("w", "h")] if grid else [])]
    kinds = [
        *plain,
        st.builds(parts.Attention, st.sampled_from(per), st.sampled_from(axes), BOOLEANS, BOOLEANS),
        st.builds(parts.GatherIndices, st.just(True) if not grid else BOOLEANS),
        st.sampled_from([parts.Scale("rows"), parts.Scale("host")]),
    ]
    if grid:
        orders = st.sampled_from(["raster", "merge_block"])
        modes = st.sampled_from([("bilinear", False, True), ("bilinear", True, False), ("bicubic", False, False)])
        kinds.append(st.builds(lambda mode, order: parts.Resampled(*mode, order), modes, orders))
    return st.one_of(kinds)


def _budget(layout):
    if layout in PADDED:
        return st.builds(vg.budgets.Budget.padded, st.integers(1, 5), st.integers(2, 24))
    bounds = st.integers(16, 200), st.integers(1, 6), st.integers(1, 40), st.none() | st.integers(16, 64)
    return st.builds(vg.budgets.Budget, *bounds)


@st.composite
def _call(draw, layout, merge, every, column):
    sides = st.integers(1, 8 // merge).map(lambda n: n * merge)
    if layout == "grid":
        item = st.tuples(st.integers(1, 3), sides, sides)
    elif layout == "sizes":
        item = st.tuples(st.just(1), sides, st.integers(1, 4).map(lambda n: n * every))
    else:
        item = st.tuples(st.just(1), st.just(1), st.integers(1, 30 // every).map(lambda n: n * every))
    items = draw(st.lists(item, min_size=1, max_size=5).map(tuple))
    kinds = st.integers(-9, 9)
    kinds = st.none() | kinds if column == "optional" else kinds
    values = tuple(draw(kinds) for _ in items) if column != "none" else ()
    if column == "nested":
        cuts = draw(st.sets(st.integers(1, len(items) - 1))) if len(items) > 1 else ()
        begins = [0, *sorted(cuts), len(items)]
        values = tuple(values[a:b] for a, b in pairwise(begins))
    forms = ["list", "tensor", "array", *["stage"] * (layout != "batch_to_pack")]
    form = draw(st.sampled_from(forms))
    more = draw(st.integers(0, 3)) if layout in BATCHED and form != "stage" else 0
    return Call(items, values, form, more, draw(st.integers(0, 9)) == 9, draw(st.integers(0, 3)))
