"""Wrong declarations of right modules: the module answers for itself, so no call is answered wrongly."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.towers import distance

REFUSED = "its budget failed verification"
SMALL = vg.budgets.Budget(64, items=1)


class Scaled(nn.Module):
    """Multiplies the rows of each item by a number that `of_item` computes from `(t, h, w)` and the column."""

    def __init__(self, of_item, default=5):
        super().__init__()
        self.of_item, self.default = of_item, default
        self.linear = nn.Linear(8, 8)
        self.eval()

    def forward(self, x, grid_thw, kind=None):
        items = torch.as_tensor(grid_thw).tolist()
        kinds = [self.default] * len(items) if kind is None else list(kind)
        scales = [self.of_item(item, int(kind)) for item, kind in zip(items, kinds, strict=True)]
        return x * torch.tensor(scales).repeat_interleave(torch.tensor([math.prod(item) for item in items]))[:, None]


def encoder_of(module, scale, budgets=(SMALL,), layout=None, outputs=None, **options):
    """An encoder of a module that takes the items, with `scale` of the item table declared in their place."""
    buffer = vg.buffers.DeviceBuffer("scale", lambda table: scale(table)[table.row_item], any_segments=False)
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", (8,)),
        layout or vg.GridTHW(),
        [buffer],
        vg.outputs.Rows() if outputs is None else outputs,
        declared_by="recipe",
    )
    return vg.GraphedEncoder(
        module, budgets, spec, forward=lambda module, x, scale: x * scale[:, None], backend="tape",
        **options,
    )  # fmt: skip


def answers(encoder, grid, **columns):
    """Whether a call gives what the module itself gives."""
    rows = rows_for([math.prod(item) for item in grid])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = encoder(rows, grid_thw=grid, **columns)
    expected = encoder.module(rows, grid, **columns)
    return output.shape == expected.shape and distance(output, expected) < 1e-6


def test_a_right_declaration_answers_with_graphs():
    encoder = encoder_of(Scaled(lambda item, kind: math.prod(item)), lambda table: table.item_rows)
    assert answers(encoder, [(2, 3, 4)])
    assert encoder.stats.replays.total() == 1


WRONG = {
    "frames": (lambda item, kind: item[1] * item[2], lambda table: table.item_rows, (3, 2, 4)),
    "height and width": (lambda item, kind: item[1], lambda table: torch.minimum(table.h, table.w), (1, 8, 4)),
    "large items": (lambda item, kind: math.prod(item), lambda table: table.item_rows.clamp(max=40), (1, 6, 10)),
    "others": (lambda item, kind: math.prod(item), lambda table: table.item_rows.max() + 0 * table.t, (1, 1, 60)),
}


@pytest.mark.parametrize(("of_item", "scale", "item"), WRONG.values(), ids=WRONG.keys())
def test_what_no_budget_can_show_is_found_eager(of_item, scale, item):
    for budget in (SMALL, vg.budgets.Budget(256, items=8)):
        encoder = encoder_of(Scaled(of_item), scale, [budget])
        assert answers(encoder, [item])
        assert encoder.stats.eager == {REFUSED: 1}


def test_a_call_that_no_budget_holds_is_answered_by_the_module_itself_until_something_is_proven():
    encoder = encoder_of(Scaled(lambda item, kind: 2.0), lambda table: 3.0 + 0 * table.t)
    assert answers(encoder, [(1, 10, 10)])
    assert encoder.stats.eager == {"larger than every budget": 1}


def test_without_graphs_the_module_itself_answers():
    module = Scaled(lambda item, kind: 2.0)
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.GridTHW(), declared_by="recipe")
    encoder = vg.GraphedEncoder(module, [SMALL], spec, forward=lambda module, x: 3 * x, backend="eager")
    assert answers(encoder, [(1, 2, 3)])


def test_a_module_that_cannot_answer_for_itself_runs_with_the_declared_buffers():
    class UsageMeter(nn.Module):
        def forward(self, x, lengths, scale=None):
            if scale is None:
                raise ValueError("no scale")
            return x * scale[:, None]

    buffer = vg.buffers.DeviceBuffer("scale", lambda table: 2.0 + 0 * table.row, any_segments=False)
    for backend in ("eager", "tape"):
        spec = vg.BufferSpec("x", vg.Lengths(), [buffer])
        encoder = vg.GraphedEncoder(UsageMeter(), [64], spec, backend=backend)
        rows = rows_for([100])
        assert distance(encoder(rows, lengths=[100]), 2 * rows) < 1e-6


COLUMNS = (vg.layouts.Column("other"), vg.layouts.Column("kind"))


def test_columns_are_proven_with_other_values_than_their_pads():
    class Both(Scaled):
        def forward(self, x, grid_thw, other, kind):
            return super().forward(x, grid_thw, kind)

    for name, replays in (("kind", 1), ("other", 0)):
        encoder = encoder_of(
            Both(lambda item, kind: 2.0 + kind),
            lambda table, name=name: 2.0 + table.column(name),
            layout=vg.GridTHW(columns=COLUMNS),
        )
        rows = rows_for([6])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = encoder(rows, grid_thw=[(1, 2, 3)], other=[1], kind=[4])
        assert distance(output, 6 * rows) < 1e-6
        assert encoder.stats.replays.total() == replays


@pytest.mark.parametrize("least", [-9, 0])
def test_columns_are_proven_where_a_module_takes_no_negative_values(least):
    def of_item(item, kind):
        if kind < least:
            raise ValueError(kind)
        return 1.0 + abs(kind)

    encoder = encoder_of(
        Scaled(of_item), lambda table: 1.0 + table.column("kind").clamp(max=1), layout=vg.GridTHW(columns=COLUMNS[1:])
    )
    assert answers(encoder, [(1, 2, 3)], kind=[2])
    assert encoder.stats.eager == {REFUSED: 1}


@pytest.mark.parametrize(("default", "replays"), [(5, 1), (4, 0)])
def test_the_default_of_a_column_is_what_the_module_takes_without_it(default, replays):
    encoder = encoder_of(
        Scaled(lambda item, kind: 1.0 + kind),
        lambda table: 1.0 + table.column("kind"),
        layout=vg.GridTHW(columns=(vg.layouts.Column("kind", default=default),)),
    )
    assert answers(encoder, [(1, 2, 3)])
    assert encoder.stats.replays.total() == replays


def test_outputs_have_as_many_entries_as_the_module_gives():
    encoder = encoder_of(
        Scaled(lambda item, kind: 2.0), lambda table: 2.0 + 0 * table.t, outputs=vg.outputs.FrameRows()
    )
    assert answers(encoder, [(2, 3, 4)])
    assert encoder.stats.eager == {REFUSED: 1}


def test_a_module_that_refuses_some_sizes_is_asked_for_others():
    def of_item(item, kind):
        if item[1] % 2 or item[2] % 2:
            raise ValueError("sides must be even")
        return 2.0

    encoder = encoder_of(Scaled(of_item), lambda table: 3.0 + 0 * table.t, [vg.budgets.Budget(256, items=8)])
    assert answers(encoder, [(1, 2, 4)])
    assert encoder.stats.eager == {REFUSED: 1}


@pytest.mark.parametrize("side", [4, 8])
def test_windows_of_another_size_are_found(side):
    def last(h, w, side):
        return (h - 1) // side * 10 + (w - 1) // side

    encoder = encoder_of(
        Scaled(lambda item, kind: 1.0 + last(*item[1:], 8)),
        lambda table: 1.0 + last(table.h, table.w, side),
        [vg.budgets.Budget(256, items=8)],
    )
    assert answers(encoder, [(1, 10, 12)])
    assert encoder.stats.replays.total() == (side == 8)


def test_segments_that_budgets_do_not_count_are_found():
    class Frames(nn.Module):
        def forward(self, x, grid_thw):
            frames = [x.unflatten(0, (t, -1)) for (t, h, w), x in zip(grid_thw, self.split(x, grid_thw), strict=True)]
            return torch.cat([(own - own.mean(1, keepdim=True)).flatten(0, 1) for own in frames])

        def split(self, x, grid_thw):
            return x.split([math.prod(item) for item in torch.as_tensor(grid_thw).tolist()])

    def centre(module, x, cu_seqlens):
        frame = torch.searchsorted(cu_seqlens[1:].long(), torch.arange(len(x), device=x.device), right=True)
        frame = frame.clamp(max=len(cu_seqlens) - 2)
        own = frame[:, None] == torch.arange(len(cu_seqlens) - 1, device=x.device)
        active = (torch.arange(len(x), device=x.device) < cu_seqlens[-1])[:, None]
        own = (own & active).float()
        sums = own.T @ torch.where(active, x, 0)
        return x - (sums / own.sum(0).clamp(min=1)[:, None])[frame]

    for counted in (True, False):
        buffer = vg.buffers.DeviceBuffer("cu_seqlens", lambda table: table.cu_seqlens("frame"), any_segments=counted)
        spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.GridTHW(), [buffer], declared_by="recipe")
        budgets = [vg.budgets.Budget(64, items=4, segments=8)]
        encoder = vg.GraphedEncoder(Frames(), budgets, spec, forward=centre, backend="tape")
        with nullcontext() if counted else pytest.raises(vg.errors.SpecError, match="because no buffer counts them"):
            assert answers(encoder, [(2, 2, 4)])
            assert answers(encoder, [(12, 2, 2)])
        assert encoder.stats.replays.total() == counted
