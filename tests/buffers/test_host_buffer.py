"""`buffers.HostBuffer`: computed on the host, for each call."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import encoder_of, rows_for
from tests.support.towers import distance


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale):
        return self.linear(x) * scale[0]


def staged(encoder, rows):
    with encoder.stage([6]) as stage:
        stage.rows.copy_(rows)
    return stage.output


def test_a_host_buffer_that_calls_its_own_encoder_is_refused():
    def scale(layout):
        if calls:
            return calls.pop()(rows_for([3]), lengths=[3])[:1, 0]
        return torch.ones(1)

    calls = []
    encoder = encoder_of(Scaled(), [vg.buffers.HostBuffer("scale", scale, (1,), torch.float32)])
    rows = rows_for([6])
    expected = encoder(rows, lengths=[6])
    for _ in range(2):
        calls.append(encoder)
        with pytest.raises(vg.errors.InputError, match=r"called the encoder that it is computed for.*another enc"):
            encoder(rows, lengths=[6])
        calls.append(encoder)
        with pytest.raises(vg.errors.InputError, match="called the encoder"):
            staged(encoder, rows)
        assert distance(encoder(rows, lengths=[6]), expected) == 0


def test_a_host_buffer_may_call_another_encoder_of_the_pool():
    class First(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    first = encoder_of(First(8, 8))

    def scale(layout):
        return first(rows_for([layout.total]), lengths=[layout.total])[:1, 0]

    encoder = encoder_of(Scaled(), [vg.buffers.HostBuffer("scale", scale, (1,), torch.float32)], pool=first.pool)
    for seed in range(3):
        rows = rows_for([5 + seed], seed)
        got = encoder(rows, lengths=[5 + seed])
        assert distance(got, encoder.eager(rows, lengths=[5 + seed])) < 1e-6


class Named(nn.Module):
    """Adds the sum of a buffer to its rows."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x, b):
        return x * self.one + 0 * b.sum()


def fixed(count):
    return lambda layout: torch.zeros(count)


def frames(layout):
    return torch.zeros(sum(t for t, *_ in layout.items))


GRIDS = [(2, 2, 3), (1, 2, 2)]

COUNTS = {
    "rows": ({"shape": ("rows",)}, lambda layout: torch.zeros(layout.total), fixed(16)),
    "items": ({"shape": ("items",)}, lambda layout: torch.zeros(len(layout)), fixed(2)),
    "frames": ({"shape": ("segments",), "per": "frame"}, frames, lambda layout: torch.zeros(len(layout))),
    "items as segments": (
        {"shape": ("segments",), "per": "item"}, lambda layout: torch.zeros(len(layout)), frames,
    ),
    "boundaries of frames": (
        {"shape": ("segments + 1",), "per": "frame"}, lambda layout: torch.zeros(len(frames(layout)) + 1), frames,
    ),
    "windows": (
        {"shape": ("segments",), "per": vg.layouts.Windows(2)},
        lambda layout: torch.zeros(sum(t * -(-h // 2) * -(-w // 2) for t, h, w in layout.items)), frames,
    ),
    "a number": ({"shape": (3,)}, fixed(3), fixed(2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", COUNTS)
def test_the_function_returns_what_the_shape_says_for_the_items_of_each_replay(kind):
    options, right, wrong = COUNTS[kind]
    x, many = torch.randn(16, 8), [*GRIDS] * 3

    def encoder(function):
        buffer = vg.buffers.HostBuffer("b", function, dtype=torch.float32, **options)
        spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.GridTHW(), [buffer])
        return vg.GraphedEncoder(Named().eval(), [vg.budgets.Budget(32, items=2, segments=12)], spec, backend="tape")

    good = encoder(right)
    assert torch.equal(good(x, grid_thw=GRIDS), x)
    assert torch.equal(good(x.repeat(3, 1), grid_thw=many), x.repeat(3, 1))
    assert good.stats.replays.total() == 4
    with pytest.raises(
        vg.errors.SpecError, match=r"the function of HostBuffer 'b' returned \[\d+\] for .*: expected a CPU"
    ):
        encoder(wrong)(x.repeat(3, 1), grid_thw=many)


def test_a_function_that_does_not_look_at_its_layout_is_an_error_of_a_split_call():
    values = torch.arange(4.0)
    buffer = vg.buffers.HostBuffer("b", lambda layout: values, ("items",), torch.float32)
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths(), [buffer])
    encoder = vg.GraphedEncoder(
        Named().eval(),
        [vg.budgets.Budget(16, items=4)],
        spec,
        backend="tape",
        verify=vg.options.Verify(at_capture=False),
    )
    encoder(torch.randn(8, 8), lengths=[2, 2, 2, 2])
    with pytest.raises(vg.errors.SpecError, match="a replay may have only some items of a call"):
        encoder(torch.randn(32, 8), lengths=[8, 8, 8, 8])


def test_segments_need_a_kind():
    with pytest.raises(vg.errors.SpecError, match="expected per='item', 'frame' or the like"):
        vg.buffers.HostBuffer("b", frames, ("segments",), torch.float32)


@pytest.mark.parametrize("value", [torch.tensor([2**33 + 1]), torch.tensor([0.5])])
def test_numbers_that_its_dtype_does_not_hold_are_refused(value):
    encoder = encoder_of(Scaled(), [vg.buffers.HostBuffer("scale", lambda layout: value, (1,), torch.int32)])
    with pytest.raises(vg.errors.SpecError, match=r"numbers that torch.int32 does not hold.*dtype="):
        encoder(rows_for([6]), lengths=[6])


@pytest.mark.parametrize(("per", "replays"), [(None, 0), ("item", 1), ("frame", 0)])
def test_without_a_kind_of_segments_a_budget_must_hold_those_of_all_kinds(per, replays):
    """A video of six frames, and room for four segments."""
    buffer = vg.buffers.HostBuffer("scale", lambda layout: torch.ones(1), (1,), torch.float32, per=per)
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.GridTHW(), [buffer])
    budget = vg.budgets.Budget(64, items=4, segments=4)
    encoder = vg.GraphedEncoder(Scaled(), [budget], spec, backend="tape")
    x = torch.randn(24, 8)
    torch.testing.assert_close(encoder(x, grid_thw=[(6, 2, 2)]), encoder.module(x, scale=torch.ones(1)))
    assert encoder.stats.replays.total() == replays
