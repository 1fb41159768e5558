"""What the proof's calls hold, so that it sees modules which are right for most calls: rows, and edges of budgets."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import varlen_graphs as vg
from tests.support.towers import distance
from tests.support.verifying import FirstRows

REFUSED = "its budget failed verification"


def encoder_of(module, budgets=(64, 128), width=8, layout=None, **declared):
    rows = vg.inputs.Rows("x", shape=(width,), dtype=declared.pop("dtype", None))
    spec = vg.BufferSpec(rows, layout or vg.Lengths(), **declared)
    return vg.GraphedEncoder(module.eval(), [*budgets], spec, backend="tape")


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


class Log(nn.Module):
    """Features of a power spectrum, of which random numbers below zero would make NaN."""

    def __init__(self, centred):
        super().__init__()
        self.linear, self.centred = nn.Linear(8, 8), centred

    def forward(self, x):
        features = self.linear(x.log())
        return features - features.mean(0) if self.centred else features


@pytest.mark.filterwarnings("ignore:.*failed verification")
@pytest.mark.parametrize("centred", [True, False])
def test_a_module_of_positive_numbers_is_proven_on_them(centred):
    module = Log(centred)
    encoder = encoder_of(module)
    for lengths in ([20, 12], [100], [5]):
        rows = torch.rand(sum(lengths), 8) + 0.1
        assert distance(encoder(rows, lengths=lengths), module(rows)) < 1e-5
    assert encoder.stats.eager == ({REFUSED: 3} if centred else {})


class Far(nn.Module):
    """Gives NaN for all numbers below 100."""

    def __init__(self):
        super().__init__()
        self.least = nn.Parameter(torch.tensor(100.0))

    def forward(self, x):
        return (x - self.least).sqrt()


def test_a_module_that_returns_nan_for_all_synthetic_rows_is_not_trusted():
    encoder, rows = encoder_of(Far()), torch.rand(9, 8) + 100
    with pytest.warns(UserWarning, match="all floating outputs are NaN for all synthetic rows"):
        encoder.capture()
    assert torch.equal(encoder(rows, lengths=[9]), (rows - 100).sqrt())
    assert encoder.stats.eager == {REFUSED: 1}


def test_rows_of_the_first_call_are_taken_where_no_others_show_anything():
    encoder, rows = encoder_of(Far()), torch.rand(9, 8) + 200
    assert torch.equal(encoder(rows, lengths=[9]), (rows - 100).sqrt())
    assert encoder.stats.replays.total() == 1


def test_outputs_that_are_nan_by_design_are_no_reason_to_refuse_others():
    class Marks(nn.Module):
        def forward(self, x):
            return x * 2, x * torch.nan

    encoder, rows = encoder_of(Marks()), torch.rand(9, 8)
    assert torch.equal(encoder(rows, lengths=[9])[0], rows * 2)
    assert not encoder.stats.eager


@pytest.mark.filterwarnings("ignore:.*failed verification")
@pytest.mark.parametrize("length", [2, 9, 26, 31])
def test_a_declaration_that_is_a_little_wrong_for_one_length_is_refused(length):
    class Takes(nn.Linear):
        def forward(self, x, lengths):
            return super().forward(x)

    def forward(module, x, cu_seqlens):
        lengths, rows = cu_seqlens.diff(), torch.arange(len(x), device=x.device, dtype=torch.int32)
        item = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).clamp(max=len(lengths) - 1)
        return module(x, None) * torch.where(lengths[item] == length, 1.4, 1.0).to(x.dtype)[:, None]

    module, spec = (
        Takes(8, 8).bfloat16(),
        vg.BufferSpec("x", vg.Lengths(), [vg.buffers.CuSeqlens()], declared_by="recipe"),
    )
    encoder = vg.GraphedEncoder(module, [64, 128], spec, forward=forward, backend="tape")
    rows = torch.randn(40, 8).bfloat16()
    assert distance(encoder(rows, lengths=[40 - length, length]), module(rows, None)) < 1e-2
    assert encoder.stats.eager == {REFUSED: 1}


class Positions(nn.Module):
    """Finds the item of a row by counting first rows, one of which is past the end if items are fewer than there may be."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(128, 8))

    def forward(self, x, cu_seqlens):
        count, starts = len(x), cu_seqlens.long()
        item = torch.zeros_like(x[:, 0], dtype=torch.long).scatter(0, starts[:-1].clamp(max=count - 1), 1).cumsum(0) - 1
        return self.linear(x) + self.table[torch.arange(count, device=x.device) - starts[item]]


@pytest.mark.filterwarnings("ignore:.*failed verification")
@pytest.mark.parametrize("kind", [Positions, FirstRows])
def test_few_items_that_use_all_rows_of_a_budget_are_tried(kind):
    outputs = vg.outputs.Items() if kind is FirstRows else vg.outputs.Rows()
    module = kind()
    encoder = encoder_of(module, buffers=[vg.buffers.CuSeqlens()], outputs=outputs)
    for lengths in ([10], [128], [100, 28], [20, 12], [64]):
        rows = torch.randn(sum(lengths), 8)
        assert distance(encoder(rows, lengths=lengths), module(rows, boundaries(lengths))) < 1e-5
    assert encoder.stats.eager == {REFUSED: 5}


class Frames(nn.Module):
    """Rows less the mean of their frame, the last of which goes on to the end."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, cu_seqlens):
        x, starts, rows = self.linear(x), cu_seqlens.long(), torch.arange(len(x), device=x.device)
        mean = functional.embedding_bag(rows, x, starts[:-1], mode="mean")
        return x - mean[torch.searchsorted(starts[1:], rows, right=True).clamp(max=len(mean) - 1)]


@pytest.mark.filterwarnings("ignore:.*failed verification")
@pytest.mark.parametrize("segments", [16, 48])
def test_frames_that_use_all_segments_of_a_budget_are_tried(segments):
    module, budgets = Frames(), [vg.budgets.Budget(rows, items=8, segments=segments) for rows in (64, 128)]
    encoder = encoder_of(module, budgets, layout=vg.GridTHW("grid_thw"), buffers=[vg.buffers.CuSeqlens(per="frame")])
    for grid in ([(1, 4, 8)], [(16, 1, 2)], [(16, 2, 3)], [(7, 2, 2), (5, 1, 3), (4, 1, 1)]):
        frames = [h * w for t, h, w in grid for _ in range(t)]
        rows = torch.randn(sum(frames), 8)
        assert distance(encoder(rows, grid_thw=grid), module(rows, boundaries(frames))) < 1e-5
    assert encoder.stats.eager == {REFUSED: 4}


class Experts(nn.Module):
    """A mixture of experts, each of which takes a share of all rows, so many that random rows never fill one."""

    def __init__(self):
        super().__init__()
        self.gate, self.weights = nn.Linear(8, 4, bias=False), nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        gain, expert = self.gate(x).softmax(-1).max(-1)
        chosen = (expert[:, None] == torch.arange(4, device=x.device)).long()
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1
        made = torch.einsum("nd,ndf->nf", x, self.weights[expert]) * gain[:, None]
        return x + torch.where((place < max(8, len(x) // 2))[:, None], made, 0)


@pytest.mark.filterwarnings("ignore:.*failed verification")
def test_rows_that_are_alike_are_tried():
    torch.manual_seed(0)
    module = Experts()
    encoder, rows = encoder_of(module), torch.randn(1, 8) + 0.1 * torch.randn(40, 8)
    assert distance(encoder(rows, lengths=[40]), module(rows)) < 1e-5
    assert encoder.stats.eager == {REFUSED: 1}


def scale_by_largest(x):
    return x.float() / x.amax()


def scale_if_large(x):
    return torch.where(x.abs().amax() > 1, x / 8, x)


class Scales(nn.Module):
    """Scales the rows of a call by their largest number."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x, mask=None):
        return self.linear(self.function(x))


@pytest.mark.filterwarnings("ignore:.*failed verification")
def test_items_of_other_magnitudes_are_tried_packed_padded_and_as_batches():
    module = Scales(scale_by_largest)
    dark, light = torch.randint(90, (100, 8)).byte(), torch.randint(256, (90, 8)).byte()
    rows, pictures = torch.cat([dark, light]), torch.stack([dark[:4], light[:4], dark[4:8]])
    packed = encoder_of(module, dtype=torch.uint8)
    assert distance(packed(rows, lengths=[100, 90]), module(rows)) < 1e-5
    batches = vg.BufferSpec(vg.inputs.Rows("x", dtype=torch.uint8), vg.Batch())
    batch = vg.GraphedEncoder(module, [1, 2], batches, backend="tape")
    assert distance(batch(pictures), module(pictures)) < 1e-5
    module = Scales(scale_if_large)
    padded = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Mask("mask"))
    one = vg.GraphedEncoder(module, vg.budgets.PaddedLadder(batch=2, length=32), padded, backend="tape")
    mask = torch.arange(32) < torch.tensor([32, 12, 3])[:, None]
    clips = torch.rand(3, 32, 8) * mask[..., None]
    clips[0] *= 4
    assert distance(one(clips, mask=mask)[mask], module(clips)[mask]) < 1e-5
    assert [encoder.stats.eager for encoder in (packed, batch, one)] == [{REFUSED: 1}] * 3


def flagged(x):
    return torch.where(x[:, -1:] == 1, x, 0).sum(0)


def smallest(x):
    return (x == torch.finfo(x.dtype).min).any().float()


def large(x):
    return (x.float() > 100).any().float()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("function", "dtype", "value"),
    [(flagged, torch.float32, 1), (smallest, torch.float32, torch.finfo(torch.float32).min), (large, torch.float8_e4m3fn, 200)],
)  # fmt: skip
def test_what_a_call_leaves_behind_reaches_no_other_call(function, dtype, value, beside):
    """Whatever number a module looks for in all rows, and in tensors beside them: padding holds zeros."""

    class Looks(nn.Module):
        def forward(self, x, y=None):
            return x.float().clamp(-9, 9) + function(x if y is None else y)

    def call(run, rows, **kwargs):
        return run(torch.zeros_like(rows), y=rows, **kwargs) if beside else run(rows, **kwargs)

    for columns in (8, 3):  # rows that graphs copy, and others
        inputs = [vg.inputs.PerRow("y", (columns,), dtype=dtype)] if beside else []
        encoder = encoder_of(Looks(), width=columns, dtype=dtype, inputs=inputs)
        few, many = torch.zeros(10, columns).to(dtype), torch.ones(60, columns)
        many[50] = value
        run = partial(call, encoder)
        alone = run(few, lengths=[10])
        run(many.to(dtype), lengths=[60])
        assert torch.equal(run(few, lengths=[10]), alone)
        assert torch.equal(alone, call(Looks(), few))
        assert not encoder.stats.eager


def test_derivatives_in_forward_mode_are_refused_by_name():
    class Jvp(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return torch.func.jvp(self.linear, (x,), (x,))[1]

    with pytest.raises(vg.errors.CaptureError, match=r"torch.func.jvp.*run the module without graphs"):
        encoder_of(Jvp())(torch.randn(5, 8), lengths=[5])


@pytest.mark.filterwarnings("ignore:.*failed verification")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_of_another_dtype_are_refused(dtype):
    class Takes(nn.Linear):
        def forward(self, x, lengths=None):
            return super().forward(x)

    module = Takes(8, 8).eval()
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths(), declared_by="recipe")
    encoder = vg.GraphedEncoder(module, [64], spec, forward=lambda module, x: module(x).to(dtype), backend="tape")
    message = f"({dtype} instead of torch.float32)"
    for lengths in ([4, 5], [7]):
        rows = torch.randn(sum(lengths), 8)
        output = encoder(rows, lengths=lengths)
        assert (message in encoder.report()) == (dtype != torch.float32)
        assert output.dtype == torch.float32
        assert distance(output, module(rows)) < 1e-6
    assert encoder.stats.eager == ({} if dtype == torch.float32 else {REFUSED: 2})


@pytest.mark.filterwarnings("ignore:.*failed verification")
@pytest.mark.parametrize("offset", [0, 1])
def test_values_of_columns_are_those_of_the_call_where_the_module_takes_no_others(offset):
    class Kinds(nn.Module):
        def forward(self, x, lengths, kind):
            if not all(kind in (41, 43) for kind in torch.as_tensor(kind).tolist()):
                raise ValueError("no such kind")
            return x * torch.as_tensor(kind).repeat_interleave(torch.as_tensor(lengths))[:, None]

    scale = vg.buffers.DeviceBuffer(
        "scale", lambda table: (table.column("kind") + offset * (table.column("kind") == 43))[table.row_item],
        any_segments=False,
    )  # fmt: skip
    columns = (vg.layouts.Column("kind", pad=41),)
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.Lengths(columns=columns), [scale], declared_by="recipe")
    encoder = vg.GraphedEncoder(
        Kinds(), [64, 128], spec, forward=lambda module, x, scale: x * scale[:, None], backend="tape"
    )
    rows = torch.randn(12, 8)
    expected = encoder.module(rows, [8, 4], [41, 43])
    assert distance(encoder(rows, lengths=[8, 4], kind=[41, 43]), expected) < 1e-6
    assert encoder.stats.replays.total() == 1 - offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38, 0.0, 3.0])
def test_a_first_call_whose_rows_show_nothing_costs_no_graph(value, dtype):
    class Squares(nn.Module):
        def forward(self, x):
            return x * x

    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    first, rows = (value * torch.rand(20, 8)).to(dtype), torch.randn(20, 8).to(dtype)
    encoder = encoder_of(Squares(), dtype=dtype)
    encoder(first, lengths=[12, 8])
    assert torch.equal(encoder(rows, lengths=[12, 8]), rows * rows)
    assert encoder.stats.replays.total() == 2
    encoder = encoder_of(Centred(), dtype=dtype)
    with pytest.warns(UserWarning, match="failed verification"):
        encoder(first, lengths=[12, 8])
    assert distance(encoder(rows, lengths=[12, 8]), rows - rows.mean(0)) < 1e-2
