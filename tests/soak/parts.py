"""The parts that random encoders are made of: what each declares, and what it computes.

A part is a description, so that a failing encoder can be printed, shrunk and made again. `buffers(at)` are what it
declares, under names that end in its number; `weights()` is its module; `run` applies it, and gets its buffers by the
beginnings of their names.
"""

from dataclasses import dataclass

import torch
from torch import nn

import varlen_graphs as vg

DIM, HEADS = 32, 2
HEAD_DIM = DIM // HEADS


def frequencies(count):
    return 100 ** -(torch.arange(count) / count)


@dataclass(frozen=True)
class Part:
    """Needs nothing declared."""

    def buffers(self, at):
        return []

    def inputs(self, at):
        """What calls bring beside the rows."""
        return []


@dataclass(frozen=True)
class Linear(Part):
    def weights(self):
        return nn.Linear(DIM, DIM)

    def run(self, weights, x, buffer):
        return weights(x)


@dataclass(frozen=True)
class Norm(Linear):
    def weights(self):
        return nn.LayerNorm(DIM)


@dataclass(frozen=True)
class Mlp(Linear):
    def weights(self):
        return nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def run(self, weights, x, buffer):
        return x + weights(x)


class Projection(nn.Linear):
    """Queries, keys and values, and the frequencies of their rotation."""

    def __init__(self):
        super().__init__(DIM, 3 * DIM)
        self.register_buffer("two_axes", frequencies(HEAD_DIM // 4))
        self.register_buffer("one_axis", frequencies(HEAD_DIM // 2))

    def forward(self, x):
        return super().forward(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)


@dataclass(frozen=True)
class Attention(Part):
    """Over packed segments; inside of windows the rows are brought into window order and back."""

    per: str | vg.layouts.Windows = "item"
    rotary: tuple[str, ...] = ()
    causal: bool = False
    scheduled: bool = False

    @property
    def windows(self):
        return self.per if isinstance(self.per, vg.layouts.Windows) else None

    def buffers(self, at):
        declared = [vg.buffers.CuSeqlens(f"cu_{at}", per=self.per), vg.buffers.MaxSeqlen(f"max_{at}", per=self.per)]
        if self.scheduled:
            declared.append(vg.buffers.AttentionSchedule(HEADS, HEAD_DIM, per=self.per, name=f"schedule_{at}"))
        if self.rotary:
            source = f"weights.{at}.{'two_axes' if len(self.rotary) == 2 else 'one_axis'}"
            order = self.windows or "raster"
            declared.append(vg.buffers.RotaryTable(f"rotary_{at}", inv_freq=source, axes=self.rotary, order=order))
        if self.windows:
            declared.append(vg.buffers.WindowIndex(self.windows, f"index_{at}"))
            declared.append(vg.buffers.WindowIndex(self.windows, f"inverse_{at}", inverse=True))
        return declared

    def weights(self):
        return Projection()

    def run(self, weights, x, buffer):
        y = x if self.windows is None else self.reorder(x, buffer("index"))
        q, k, v = weights(y)
        if self.rotary:
            q, k = vg.kernels.apply_rotary(q, k, *buffer("rotary"))
        schedule = buffer("schedule") if self.scheduled else None
        mixed = vg.varlen_attention(
            q, k, v, buffer("cu"), buffer("max"), causal=self.causal, schedule=schedule
        ).flatten(1)  # fmt: skip
        return x + (mixed if self.windows is None else self.reorder(mixed, buffer("inverse")))

    def reorder(self, x, index):
        return x.unflatten(0, (len(index), -1))[index].flatten(0, 1)


@dataclass(frozen=True)
class MaskedAttention(Part):
    """Over a padded batch, as most code writes it: all scores, and a mask of keys, or of keys and queries."""

    causal: bool = False

    def buffers(self, at):
        return [vg.buffers.AttentionMask(f"mask_{at}", causal=True)] if self.causal else [vg.buffers.Mask(f"real_{at}")]

    def weights(self):
        return Projection()

    def run(self, weights, x, buffer):
        q, k, v = (part.transpose(1, 2) for part in weights(x))
        scores = q @ k.transpose(-1, -2) / HEAD_DIM**0.5
        mask = buffer("mask") if self.causal else buffer("real")[:, None, None]
        scores = scores.masked_fill(~mask, -torch.inf)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Resampled(Part):
    """Adds a square table of embeddings, resampled to the grid of each item."""

    mode: str = "bilinear"
    align_corners: bool = False
    antialias: bool = False
    order: str = "raster"

    def buffers(self, at):
        options = {"align_corners": self.align_corners, "antialias": self.antialias, "order": self.order}
        return [vg.buffers.Interpolation(f"table_{at}", table=f"weights.{at}.weight", mode=self.mode, **options)]

    def weights(self):
        return nn.Embedding(5 * 5, DIM)

    def run(self, weights, x, buffer):
        return x + buffer("table")


@dataclass(frozen=True)
class GatherIndices(Part):
    """Adds sines and cosines of the place in the frame, or a learned embedding of the place in the item."""

    learned: bool = False

    def buffers(self, at):
        if self.learned:
            return [vg.buffers.RowPositions(f"place_{at}")]
        return [vg.buffers.SinCos(f"place_{at}", frequencies(DIM // 4), largest=64)]

    def weights(self):
        return nn.Embedding(100, DIM)

    def run(self, weights, x, buffer):
        return x + weights(buffer("place") % 100) if self.learned else vg.buffers.add_sincos(x, buffer("place"))


@dataclass(frozen=True)
class Scale(Part):
    """Multiplies each row by a number of its item: of its rows, or of the column `kind`; on the device or the host."""

    by: str = "rows"

    def buffers(self, at):
        if self.by == "host":
            return [vg.buffers.HostBuffer(f"scale_{at}", host_scales, shape=("rows",), dtype=torch.float32)]
        return [vg.buffers.DeviceBuffer(f"scale_{at}", self.scales, any_segments=self.by == "rows")]

    def scales(self, table):
        of_items = table.column("kind") / 8 + 1 if self.by == "kind" else 8 / (table.item_rows + 8)
        return of_items[:, None] if table.layout.padded else of_items[table.row_item]

    def weights(self):
        return nn.Identity()

    def run(self, weights, x, buffer):
        return x * buffer("scale")[..., None]


def host_scales(layout):
    return torch.tensor([1 + rows % 3 for rows in layout.rows for _ in range(rows)], dtype=torch.float32)


@dataclass(frozen=True)
class Beside(Part):
    """Adds what calls bring beside the rows: for each `"row"`, for each `"item"`, for the `"call"`.

    The entry of an item comes to the forward for each row, or as it is, to be gathered by a buffer (`"gathered"`).
    """

    of: str = "row"

    def buffers(self, at):
        index = vg.buffers.DeviceBuffer(f"item_{at}", lambda table: table.row_item, any_segments=False)
        return [index] if self.of == "gathered" else []

    def inputs(self, at):
        kinds = {
            "row": vg.inputs.PerRow,
            "item": lambda name, shape: vg.inputs.PerItem(name, shape, per_row=True),
            "gathered": vg.inputs.PerItem,
            "call": vg.inputs.PerCall,
        }
        return [kinds[self.of](f"beside_{at}", (DIM,))]

    def weights(self):
        return nn.Identity()

    def run(self, weights, x, buffer):
        beside = buffer("beside")
        return x + (beside[buffer("item")] if self.of == "gathered" else beside)

    def entries(self, rows, lengths):
        """What a call brings, of its rows: the same for an item in every call that has it."""
        waves = torch.arange(1, DIM + 1, device=rows.device) / DIM
        if self.of == "call":
            return waves
        own = rows.flatten(1).float().mean(1) if rows.dim() > 1 else rows.float()
        each = torch.sin(own[:, None] * waves)
        return each if self.of == "row" else torch.stack([part[0] for part in each.split(lengths)])
