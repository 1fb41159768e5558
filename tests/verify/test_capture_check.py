"""The proof of new graphs, which is on by default: what is wrong runs eager, and says why."""

import re
import warnings

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Attention, attention_encoder, encoder_of, rows_for
from tests.support.towers import distance, equal_bits
from tests.support.verifying import WrongAt64

REFUSED = "its budget failed verification"


@torch.library.custom_op("varlen_graphs_tests::refuse_nan", mutates_args=())
def refuse_nan(x: torch.Tensor) -> torch.Tensor:
    """Return a copy; raise as kernels on the CPU do that quantise."""
    if x.isnan().any():
        raise RuntimeError("min should be less than or equal to max")
    return x.clone()


class Attends(nn.Module):
    """A plain encoder: every row attends to all rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Wrong(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear, self.conv = function, nn.Linear(8, 8), nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.function(self, self.linear(x))


def ramp(x):
    return torch.linspace(0, 1, len(x), device=x.device)[:, None]


WRONG = {
    "a convolution over rows": lambda module, x: module.conv(x.T[None])[0].T,
    "the order reversed": lambda module, x: x.flip(0),
    "a difference to the last row": lambda module, x: x - x[-1],
    "a difference to the first row": lambda module, x: x - x[:1],
    "a ramp over all rows": lambda module, x: x + ramp(x),
    "the number of rows": lambda module, x: x * (len(x) // 4),
    "its root": lambda module, x: x / len(x) ** 0.5,
    "pooling": lambda module, x: x + nn.functional.adaptive_avg_pool1d(x.T, 4).mean(-1),
    "two halves": lambda module, x: (x.view(2, -1, 8) - x.view(2, -1, 8).mean(0)).view(-1, 8),
    "a mean": lambda module, x: x - x.mean(0),
    "a sum so far": lambda module, x: x.cumsum(0),
    "a softmax over rows": lambda module, x: x.softmax(0),
    "ranks": lambda module, x: x.argsort(0).argsort(0).to(x.dtype),
    "a maximum": lambda module, x: x / x.amax(),
    "neighbours": lambda module, x: x + x.roll(1, 0),
    "every second row": lambda module, x: x * (torch.arange(len(x), device=x.device) % 2)[:, None],
}


@pytest.mark.parametrize("function", WRONG.values(), ids=WRONG.keys())
def test_what_mixes_rows_runs_eager_with_one_warning(function, caplog):
    caplog.set_level("INFO", "varlen_graphs")
    module = Wrong(function).eval()
    encoder = encoder_of(module)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for lengths in ([20, 10], [6], [40, 3, 3]):
            rows = rows_for(lengths)
            assert distance(encoder(rows, lengths=lengths), module(rows)) < 1e-6
    (warning,) = caught
    assert "2 of 2 graphs failed verification at their capture" in str(warning.message)
    (logged,) = caplog.messages  # and nothing of new graphs
    assert logged == str(warning.message).partition("\n")[0]
    assert encoder.stats.eager == {REFUSED: 3}
    assert not encoder.stats.replays
    assert "rejected: wrong in " in encoder.report()


def test_attention_over_all_rows_is_refused_with_its_line():
    encoder, rows = encoder_of(Attends().eval()), rows_for([20, 10])
    line = r"at .*test_capture_check.py:\d+, in forward: return nn.functional.scaled_dot_product_attention\(q, k, v\)"
    with pytest.warns(UserWarning, match=f"(?s)differs by inf from the module itself.*{line}"):
        assert distance(encoder(rows, lengths=[20, 10]), encoder.module(rows)) < 1e-6


def test_no_row_of_an_earlier_call_reaches_a_later_one():
    encoder, rows = encoder_of(Attends().eval()), rows_for([20])
    with pytest.warns(UserWarning, match="failed verification"):
        alone = encoder(rows, lengths=[20])
    for seed in range(3):
        encoder(100 * rows_for([60, 50], seed), lengths=[60, 50])
        assert equal_bits(encoder(rows, lengths=[20]), alone)


def test_only_the_budget_that_is_wrong_is_refused():
    encoder = encoder_of(WrongAt64())
    with pytest.warns(UserWarning, match="1 of 2 graphs failed verification"):
        encoder.capture()
    for lengths in ([60], [100]):
        rows = rows_for(lengths)
        assert distance(encoder(rows, lengths=lengths), encoder.module.linear(rows)) < 1e-5
    assert encoder.stats.replays.total() == 2
    assert not encoder.stats.eager
    assert {budget.rows for budget in encoder.stats.replays} == {128}


def test_a_refused_set_of_static_arguments_leaves_the_others_alone():
    class Scaled(nn.Module):
        def forward(self, x, mean=False):
            return x - x.mean(0) if mean else 2 * x

    encoder, rows = encoder_of(Scaled()), rows_for([20])
    for _ in range(2):
        assert equal_bits(encoder(rows, lengths=[20]), 2 * rows)
    with pytest.warns(UserWarning, match="failed verification"):
        assert distance(encoder(rows, lengths=[20], mean=True), rows - rows.mean(0)) < 1e-6
    encoder(rows, lengths=[20])
    assert encoder.stats.replays.total() == 3
    assert encoder.stats.eager == {REFUSED: 1}


def test_segments_of_the_wrong_kind_are_found_where_the_module_takes_the_items():
    class Videos(Attention):
        """Attends within frames; takes the segments, or computes them from the items."""

        def forward(self, x, grid_thw, cu_seqlens=None, max_seqlen=None):
            if cu_seqlens is None:
                frames = (grid_thw[:, 1] * grid_thw[:, 2]).repeat_interleave(grid_thw[:, 0])
                cu_seqlens = nn.functional.pad(frames.cumsum(0), (1, 0)).int()
                max_seqlen = int(frames.max())
            return super().forward(x, cu_seqlens, max_seqlen)

    for per, replays in (("frame", 1), ("item", 0)):
        buffers = [vg.buffers.CuSeqlens(per=per), vg.buffers.MaxSeqlen(per=per)]
        spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.GridTHW(), buffers)
        module, rows = Videos(), rows_for([24])
        encoder = vg.GraphedEncoder(module, [vg.budgets.Budget(256, items=8, segments=32)], spec, backend="tape")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = encoder(rows, grid_thw=[(2, 3, 4)])
        assert len(caught) == 1 - replays
        assert distance(output, module(rows, torch.tensor([(2, 3, 4)]))) < 1e-5
        assert encoder.stats.replays.total() == replays
        assert "verified against the module itself" in encoder.report()


def test_the_report_says_where_the_declaration_itself_was_not_proven():
    encoder = attention_encoder()
    encoder(rows_for([6]), lengths=[6])
    assert "what the declaration means, such as per='item' or per='frame', is not verified" in encoder.report()


def test_a_function_that_is_not_what_the_module_computes_never_answers():
    class Doubled(nn.Module):
        def forward(self, x, lengths):
            return 2 * x

    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths(), declared_by="recipe")
    encoder = vg.GraphedEncoder(Doubled(), [64, 128], spec, forward=lambda module, x: 3 * x, backend="tape")
    rows = rows_for([6])
    with pytest.warns(UserWarning, match="compute something other than the module itself"):
        assert equal_bits(encoder(rows, lengths=[6]), 2 * rows)
    assert equal_bits(encoder(rows, lengths=torch.tensor([6])), 2 * rows)


class TellsMore(nn.Module):
    """Returns another tensor, a number and nothing beside its output."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x, lengths=None):
        return {"out": self.lin(x), "twice": 2 * x, "pair": (x + 1, x + 2), "scale": 3, "left": None}


@pytest.mark.filterwarnings("ignore:.*failed verification")
@pytest.mark.parametrize("declared", ["fields", "one extent"])
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"twice": None}, r"output.twice \(None instead of tensors\) of item"),
        ({"pair": None}, r"output.pair \(None instead of tensors\) of item"),
        ({"scale": 4}, r"output.scale \(4 instead of 3\) of item"),
        ({"scale": None}, r"output.scale \(None instead of 3\)"),
        ({"left": 5}, None),  # a field that the module leaves empty
        ({}, None),
    ],
)
def test_what_a_function_leaves_out_and_other_python_values_are_wrong(declared, more, why):
    def forward(module, x):
        return {"out": module.lin(x), "twice": 2 * x, "pair": (x + 1, x + 2), "scale": 3, "left": None} | more

    rows = vg.outputs.Rows()
    outputs = rows if declared == "one extent" else dict.fromkeys(["out", "twice", "pair", "scale", "left"], rows)
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths(), outputs=outputs)
    module = TellsMore().eval()
    encoder = vg.GraphedEncoder(module, [64], spec, forward=forward, backend="tape")
    for lengths in ([5], [4, 5]):
        x = rows_for(lengths)
        out, expected = encoder(x, lengths=lengths), module(x)
        assert distance(out["out"], expected["out"]) < 1e-6
        if why is not None:
            assert distance(out["twice"], expected["twice"]) == distance(out["pair"], expected["pair"]) == 0
            assert out["scale"] == 3
    assert encoder.stats.replays.total() == (0 if why else 2)
    assert why is None or re.search(why, " ".join(encoder.report(detail=True).split()))


@pytest.mark.parametrize("draw", [torch.rand_like, lambda x: nn.functional.dropout(x, 0.5, training=True)])
def test_random_numbers_are_named(draw):
    encoder = encoder_of(Wrong(lambda module, x: x + draw(x)).eval())
    with pytest.warns(
        UserWarning, match=r"(?s)The module draws random numbers, so no two runs agree: aten\..*at .*py:\d"
    ):
        encoder(rows_for([6]), lengths=[6])
    assert encoder.stats.eager == {REFUSED: 1}


def test_strict_raises_and_then_runs_eager():
    encoder, rows = encoder_of(Attends().eval(), verify=vg.options.Verify(strict=True)), rows_for([6])
    with pytest.raises(vg.errors.VerificationError, match="failed verification at their capture"):
        encoder(rows, lengths=[6])
    assert distance(encoder(rows, lengths=[6]), encoder.module(rows)) < 1e-6


def test_it_can_be_switched_off():
    encoder, rows = encoder_of(Attends().eval(), verify=vg.options.Verify(at_capture=False)), rows_for([6])
    encoder(rows, lengths=[6])
    assert encoder.stats.replays.total() == 1


def test_lazy_encoders_request_no_refused_budget_again():
    encoder, rows = encoder_of(WrongAt64(), capture=vg.options.Capture(lazy=True)), rows_for([6])
    encoder(rows, lengths=[6])
    with pytest.warns(UserWarning, match="failed verification"):
        encoder.capture_pending(None)
    for _ in range(2):
        assert distance(encoder(rows, lengths=[6]), encoder.module.linear(rows)) < 1e-5
        assert encoder.capture_pending(None) == []


def test_verify_tells_why_a_budget_was_refused():
    encoder = encoder_of(Attends().eval())
    with pytest.warns(UserWarning, match="failed verification"):
        encoder.capture()
    with pytest.raises(vg.errors.VerificationError, match="scaled_dot_product_attention"):
        encoder.verify([{"x": rows_for([6]), "lengths": [6]}])


def test_synthetic_calls_that_the_module_refuses_are_replaced_by_simpler_ones():
    class Images(Attention):
        def forward(self, x, grid_thw, cu_seqlens, max_seqlen):
            return super().forward(x, cu_seqlens, max_seqlen)

    def images_only(layout):
        if any(t > 1 for t, *_ in layout.items):
            raise ValueError("images only")
        return torch.zeros(1)

    buffers = [
        vg.buffers.CuSeqlens(),
        vg.buffers.MaxSeqlen(),
        vg.buffers.HostBuffer("only", images_only, (1,), torch.float32),
    ]
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.GridTHW(), buffers)
    encoder = vg.GraphedEncoder(
        Images(), [vg.budgets.Budget(256, items=8)], spec, backend="tape",
        forward=lambda module, x, grid_thw, cu_seqlens, max_seqlen, only: module(x, grid_thw, cu_seqlens, max_seqlen),
    )  # fmt: skip
    encoder(rows_for([24]), grid_thw=[(1, 4, 6)])
    assert encoder.stats.replays.total() == 1


def test_a_module_whose_synthetic_calls_all_fail_is_not_trusted():
    def fails(layout):
        if layout.items != ((1, 1, 7),):
            raise ValueError("never seen")
        return torch.zeros(1)

    spec = vg.BufferSpec("x", vg.Lengths(), [vg.buffers.HostBuffer("only", fails, (1,), torch.float32)])
    encoder = vg.GraphedEncoder(nn.Identity(), [64], spec, backend="tape", forward=lambda module, x, only: x + only)
    with pytest.warns(UserWarning, match="could not be verified, because synthetic calls fail: never seen"):
        encoder(rows_for([7]), lengths=[7])
    assert encoder.stats.eager == {REFUSED: 1}


def test_token_ids_are_valid_for_every_table():
    class Tokens(nn.Module):
        def __init__(self, pad):
            super().__init__()
            self.words, self.kinds = nn.Embedding(50, 8, padding_idx=pad), nn.Embedding(5, 8)

        def forward(self, ids):
            return self.words(ids) + self.kinds(ids % 5)

    for pad in (0, 3, 49):
        spec = vg.BufferSpec(vg.inputs.Rows("ids", (), torch.int64, pad=pad), vg.Lengths())
        encoder = vg.GraphedEncoder(Tokens(pad), [64], spec, backend="tape")
        encoder(torch.arange(20), lengths=[20])
        assert encoder.stats.replays.total() == 1


def test_items_that_act_on_each_other_are_refused_whatever_their_order():
    class Largest(nn.Module):
        def forward(self, x, lengths):
            return x * lengths.max()

    encoder = encoder_of(Largest().eval())
    with pytest.warns(UserWarning, match=r"(?s)\d of its items in another order.*The items of a call act on"):
        encoder(rows_for([5, 9]), lengths=[5, 9])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_graphs_whose_proof_was_interrupted_are_not_used(error):
    interrupts = iter([error])

    class Interrupted(Attends):
        def forward(self, x):
            if len(x) == 68 and (pending := next(interrupts, None)):  # the rows of a synthetic call
                raise pending
            return super().forward(x)

    encoder, rows = encoder_of(Interrupted().eval()), rows_for([20, 10])
    with pytest.raises(error):
        encoder(rows, lengths=[20, 10])
    assert next(interrupts, None) is None
    with pytest.warns(UserWarning, match="2 of 2 graphs failed verification"):
        assert distance(encoder(rows, lengths=[20, 10]), encoder.module(rows)) < 1e-6
    assert not encoder.stats.replays


def test_a_declaration_that_the_proof_finds_wrong_is_an_error_of_every_call():
    def wrong(layout):
        return torch.zeros(3, 3)

    buffers = [vg.buffers.HostBuffer("cu_seqlens", wrong, ("items",), torch.int32), vg.buffers.MaxSeqlen()]
    encoder = attention_encoder(spec=vg.BufferSpec("x", vg.Lengths(), buffers))
    for _ in range(2):
        with pytest.raises(vg.errors.SpecError, match="the function of HostBuffer 'cu_seqlens' returned"):
            encoder(rows_for([6]), lengths=[6])
    assert not encoder.stats.replays


def test_an_edge_at_which_the_module_itself_does_not_repeat_refuses_nothing():
    runs = []

    class Unsteady(nn.Linear):
        """Gives garbage for a single row, as an operator that reads memory that nobody wrote may."""

        def forward(self, x, lengths):
            runs.append(len(runs))
            return super().forward(x) + (len(runs) if x.shape[0] == 1 else 0)

    encoder = vg.GraphedEncoder(
        Unsteady(8, 8).eval().requires_grad_(False), [64], vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths()),
        forward=lambda module, x: nn.Linear.forward(module, x), backend="tape", verify=vg.options.Verify(strict=True),
    )  # fmt: skip
    x = torch.randn(6, 8)
    assert torch.allclose(encoder(x, lengths=[2, 4]), nn.Linear.forward(encoder.module, x), atol=1e-6)
    assert encoder.stats.replays.total() == 1


class Frames(nn.Module):
    """Rows share the mean of those of the same video."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x, video, active):
        same = ((video[:, None] == video[None]) & active[None]).to(x.dtype)
        return self.linear(x) + same @ torch.where(active[:, None], x, 0) / same.sum(1, keepdim=True).clamp(min=1)


def test_items_that_act_on_those_of_the_same_number_are_refused():
    spec = vg.BufferSpec(
        "x", vg.Lengths(), [vg.buffers.DeviceBuffer("active", lambda table: table.row_active)],
        inputs=[vg.inputs.PerItem("video", dtype=torch.int64, per_row=True)],
    )  # fmt: skip
    module, rows = Frames().eval().requires_grad_(False), torch.randn(300, 128)
    encoder = vg.GraphedEncoder(module, [128, 256], spec, backend="tape")
    with pytest.warns(UserWarning, match="failed verification"):
        out = encoder(rows, video=[5, 5, 5], lengths=[100] * 3)
    all_rows = torch.ones(300, dtype=torch.bool)
    torch.testing.assert_close(out, module(rows, torch.full((300,), 5), all_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_that_are_a_little_wrong_are_wrong(dtype):
    class Numbered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return {"x": self.linear(x), "ids": torch.full((len(x),), 10_000 + len(x), device=x.device)}

    module, rows = Numbered().eval().requires_grad_(False).to(dtype), rows_for([12, 8]).to(dtype)
    encoder = encoder_of(module)
    with pytest.warns(UserWarning, match="failed verification"):
        assert (encoder(rows, lengths=[12, 8])["ids"] == 10_020).all()


def test_a_graph_in_which_an_operator_refuses_nan_is_refused_and_its_first_call_runs_eager():
    encoder = encoder_of(Wrong(lambda module, x: refuse_nan(x)))
    rows = rows_for([5, 3])
    with pytest.warns(UserWarning, match="(?s)failed verification.*min should be less than or equal to max"):
        out = encoder(rows, lengths=[5, 3])
    assert torch.equal(out, encoder.module(rows))
    assert encoder.stats.eager == {REFUSED: 1}
