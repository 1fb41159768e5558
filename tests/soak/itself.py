"""The module that a case describes, which computes everything from the items itself, in plain torch.

It is what declarations are compared with, so it shares no code with the buffers that they declare.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.soak import parts
from tests.soak.cases import BATCHED, PADDED, Encoder


class Itself(Encoder):
    """Takes the items and computes positions, segments and all else from them; with buffers, it uses these instead.

    Rows come in any floating dtype, as towers take them.
    """

    def __init__(self, case, strict):
        super().__init__(case)
        self.most = max(40, *(n for call in case.calls for n in map(math.prod, call.items))) if strict else math.inf
        kinds = [kind for call in case.calls for kinds in call.kinds for kind in self.kinds([kinds], 1)[0]]
        self.least = min([-3, 0, *kinds][0 if case.column == "plain" else 1 :]) if strict else -math.inf

    def forward(self, x, layout, kind=None, real=None, flip=False, **buffers):
        beside = {name: value for name, value in buffers.items() if kind_of(name) == "beside"}
        if buffers.keys() - beside:
            return super().forward(self.cast(x), flip, **without_buffers(self.case, x) | buffers)
        case, x = self.case, self.cast(x)
        items, real = self.items(layout, real, x)
        batch = x.shape[:2] if case.layout in BATCHED else None
        x = x[real] if batch else x.squeeze(0) if case.rows_dim else x
        kinds, groups = self.kinds(kind, len(items))
        if max(map(math.prod, items)) > self.most or min(kinds) < self.least:
            raise RuntimeError(f"items {items} of kinds {kinds} are not for this module")
        places = GatherIndices.of(items, kinds, groups, case.merge)
        x = self.embed(x)
        x = x.flip(-1) if flip else x
        for at, (part, weights) in enumerate(zip(case.parts, self.weights, strict=True)):
            if isinstance(part, parts.Beside):
                x = x + entries_of(part, beside[f"beside_{at}"], real if batch else None, places).to(x.dtype)
                continue
            x = APPLY.get(type(part), lambda part, weights, x, places: part.run(weights, x, None))(
                part, weights, x, places
            )
        return {name: self.output(name, x, places, batch, real) for name in case.outputs}

    def cast(self, x):
        return x.to(self.embed.weight.dtype) if self.case.rows == "floats" else x

    def items(self, layout, real, x):
        """`(t, h, w)` of each item, and the mask of a padded batch."""
        described = torch.as_tensor(layout)
        if self.case.layout == "mask":
            return [(1, 1, n) for n in described.sum(1).tolist()], described.bool()
        sizes = {"grid": lambda n: tuple(n), "sizes": lambda n: (1, *n)}.get(self.case.layout, lambda n: (1, 1, n))
        items = [sizes(size) for size in described.tolist()]
        if self.case.layout == "padded_lengths":
            real = torch.arange(x.shape[1], device=described.device) < described[:, None]
        return items, real

    def kinds(self, kind, count):
        """The column and the group of each item."""
        groups = [5] * count if kind is None else kind.tolist() if isinstance(kind, torch.Tensor) else list(kind)
        groups = [group if isinstance(group, list | tuple) else [group] for group in groups]
        kinds = [5 if kind is None else kind for group in groups for kind in group]
        return kinds, [at for at, group in enumerate(groups) for _ in group]

    def output(self, name, x, places, batch, real):
        if name == "pooled":
            return torch.stack([own.mean(0) for own in x.split(places.lengths)])
        if name == "merged":
            return x.unflatten(0, (-1, self.case.every)).sum(1)
        if batch is None:
            return x[None] if self.case.rows_dim else x
        padded = x.new_zeros(*batch, x.shape[-1])
        padded[real] = x
        return padded


@dataclass(frozen=True)
class GatherIndices:
    """Where each row lies: int64 `[rows]` each, and `[rows, 2]` for the height and width in its frame."""

    items: list
    lengths: list
    merge: int
    item: torch.Tensor
    row: torch.Tensor
    frame: torch.Tensor
    group: torch.Tensor
    kind: torch.Tensor

    @classmethod
    def of(cls, items, kinds, groups, merge):
        lengths = [t * h * w for t, h, w in items]
        of_item = torch.tensor(list(zip(range(len(items)), kinds, groups, strict=True)))
        item, kind, group = of_item.repeat_interleave(torch.tensor(lengths), 0).unbind(1)
        row = torch.cat([torch.arange(n) for n in lengths])
        frame = torch.cat([torch.arange(t).repeat_interleave(h * w) for t, h, w in items])
        return cls(items, lengths, merge, item, row, frame, group, kind)

    def grid(self, order):
        """Height and width of each row in its frame, whose rows are in this order."""
        side = 1 if order == "raster" else self.merge
        return torch.cat([squares(h, w, side).repeat(t, 1) for t, h, w in self.items])

    def count(self):
        """Rows of the item of each row."""
        return torch.tensor(self.lengths)[self.item]

    def along(self, axis, order):
        at = {"row": self.row, "t": self.frame}
        return at[axis] if axis in at else self.grid(order)[:, "hw".index(axis)]

    def segment(self, per):
        """What rows of one segment have in common, `[rows, ...]`."""
        if per == "frame":
            return torch.stack([self.item, self.frame], 1)
        if isinstance(per, str):
            return (self.group if per == "group" else self.item)[:, None]
        windows = self.grid("merge_block") // (per.side * self.merge)
        return torch.cat([self.item[:, None], self.frame[:, None], windows], 1)


def squares(h, w, side):
    """Coordinates of the rows of a frame, square by square."""
    at = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    return at.view(h // side, side, w // side, side, 2).transpose(1, 2).reshape(-1, 2)


def attend(part, weights, x, places):
    q, k, v = weights(x)
    if getattr(part, "rotary", ()):
        angle = angles(part, weights, places).to(x.device)
        q, k = (turn(y, angle) for y in (q, k))
    segment = places.segment(getattr(part, "per", "item"))
    apart = (segment[:, None] != segment).any(-1)
    if getattr(part, "causal", False):
        apart |= torch.ones_like(apart).triu(1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / parts.HEAD_DIM**0.5
    scores = scores.masked_fill(apart.to(x.device), -torch.inf).softmax(-1)
    return x + torch.einsum("hqk,khd->qhd", scores, v).flatten(1)


def angles(part, weights, places):
    frequencies = weights.two_axes if len(part.rotary) == 2 else weights.one_axis
    order = "raster" if part.windows is None else "merge_block"
    return torch.cat([places.along(axis, order)[:, None] * frequencies.cpu() for axis in part.rotary], 1)[:, None]


def turn(y, angle):
    """Rotate pairs of channels, half a head apart."""
    one, other = y.chunk(2, -1)
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


def resample(part, weights, x, places):
    table = weights.weight.view(1, 5, 5, -1).permute(0, 3, 1, 2)
    corners = {"align_corners": part.align_corners, "antialias": part.antialias}
    sizes = {(h, w): F.interpolate(table, (h, w), mode=part.mode, **corners)[0] for _, h, w in places.items}
    added = [
        sizes[h, w][:, at[:, 0], at[:, 1]].T.repeat(t, 1)
        for t, h, w in places.items
        for at in [squares(h, w, 1 if part.order == "raster" else places.merge)]
    ]
    return x + torch.cat(added)


def entries_of(part, beside, real, places):
    """The entry of each row, of what calls bring beside the rows; an entry an item may come for each row, too."""
    if part.of == "call" or (part.of == "item" and len(beside) == len(places.item) != len(places.items)):
        return beside
    if part.of == "row":
        return beside if real is None else beside[real]
    return beside[places.item.to(beside.device)]


def place(part, weights, x, places):
    if part.learned:
        return x + weights(places.row.to(x.device) % 100)
    angles = [places.along(axis, "raster")[:, None] * parts.frequencies(parts.DIM // 4) for axis in "wh"]
    return x + torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], 1).to(x.device)


def scale(part, weights, x, places):
    by = {
        "rows": lambda: 8 / (places.count() + 8),
        "kind": lambda: places.kind / 8 + 1,
        "host": lambda: 1 + places.count() % 3,
    }[part.by]()
    return x * by[:, None].to(x.device)


APPLY = {
    parts.Attention: attend,
    parts.MaskedAttention: attend,
    parts.Resampled: resample,
    parts.GatherIndices: place,
    parts.Scale: scale,
}
"""How parts with buffers run without them."""


def without_buffers(case, x):
    """What a forward may use in place of each buffer that it does not get, by name."""
    size = x.shape[:2] if case.layout in PADDED else x.shape[case.rows_dim : case.rows_dim + 1]
    rows, tokens, device = size[-1], size[-1] // case.merge**2, x.device
    flat = torch.zeros(1, parts.DIM // 2, device=device), torch.zeros(rows, 2, dtype=torch.int64, device=device)
    ones = torch.ones(rows, parts.HEAD_DIM, device=device)
    values = {
        "cu": torch.arange(0, rows + 1, rows, dtype=torch.int32, device=device),
        "max": rows,
        "schedule": None,
        "rotary": (ones, 0 * ones),
        "index": torch.arange(tokens, device=device),
        "inverse": torch.arange(tokens, device=device),
        "table": torch.zeros(rows, 1, device=device),
        "scale": torch.ones(size, device=device),
        "real": torch.ones(size, dtype=torch.bool, device=device),
        "mask": torch.ones(rows, rows, dtype=torch.bool, device=device),
        "item": torch.zeros(size, dtype=torch.int64, device=device),
    }
    names = {buffer.name: part for at, part in enumerate(case.parts) for buffer in part.buffers(at)}
    place = {True: torch.arange(rows, device=device), False: flat}
    return {
        name: place[part.learned] if isinstance(part, parts.GatherIndices) else values[kind_of(name)]
        for name, part in names.items()
    }


def kind_of(name):
    """The name of a buffer without the number of its part."""
    return name.split("_")[0]
