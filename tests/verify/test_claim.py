"""`forward=` claims to compute what the module computes: every call is held to that, and reports name the reference."""

import warnings

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for
from tests.support.towers import distance

LENGTHS = [4, 6]


class AddsPerItem(nn.Module):
    """Adds to each row the entry of its item."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, lengths, c):
        return self.linear(x) + c.repeat_interleave(torch.as_tensor(lengths), 0)


class AddsPerRow(AddsPerItem):
    """Adds to each row an entry of its own."""

    def forward(self, x, lengths, c):
        if len(c) != len(x):
            raise ValueError("expected an entry a row")
        return self.linear(x) + c


class NeedsSegments(AddsPerItem):
    """Takes no lengths, so it cannot run with the arguments of a call."""

    def forward(self, x, cu_seqlens, c):
        return self.linear(x) + c


def right(module, x, c, **buffers):
    return module.linear(x) + c


def wrong(module, x, c, **buffers):
    return module.linear(x) - c


def per_row_encoder(module, forward, buffers=(), **options):
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", shape=(8,)),
        vg.Lengths("lengths"),
        buffers,
        inputs=[vg.inputs.PerItem("c", (8,), per_row=True)],
    )
    return vg.GraphedEncoder(module.eval(), [64], spec, forward=forward, backend="tape", **options)


def call():
    return {"x": rows_for(LENGTHS), "lengths": LENGTHS, "c": rows_for([2], seed=1)}


def expected(module, x, lengths, c):
    return module.linear(x) + c.repeat_interleave(torch.as_tensor(lengths), 0)


def answer(encoder, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return encoder(**arguments)


@pytest.mark.parametrize("module", [AddsPerItem, AddsPerRow])
@pytest.mark.parametrize("options", [{}, {"verify": 3}], ids=["by default", "verified in service"])
def test_a_wrong_function_of_an_entry_a_row_is_refused(module, options):
    encoder = per_row_encoder(module(), wrong, **options)
    for _ in range(2):
        with pytest.raises(vg.errors.SpecError, match=r"'wrong' computes something other than .*differs by"):
            answer(encoder, **call())
    assert not encoder.stats.replays


@pytest.mark.parametrize("module", [AddsPerItem, AddsPerRow])
def test_a_right_function_of_an_entry_a_row_replays_and_names_the_module(module):
    encoder = per_row_encoder(module(), right, verify=3)
    assert distance(encoder(**call()), expected(encoder.module, **call())) < 1e-6
    assert encoder.stats.replays.total() == 1
    assert "verified against the module itself" in encoder.report()
    assert "1 replay verified against the module itself, 0 wrong" in encoder.report()
    verified = encoder.verify([call()])
    assert verified.against == ("the module itself",)
    assert "compared with the module itself" in str(verified)


@pytest.mark.parametrize("forward", [None, right])
def test_where_the_module_takes_no_such_call_nothing_says_that_it_was_asked(forward):
    buffers = [vg.buffers.CuSeqlens(), *([] if forward is None else [vg.buffers.MaxSeqlen()])]
    encoder = per_row_encoder(NeedsSegments(), forward, buffers, verify=3)
    assert distance(encoder(**call()), expected(encoder.module, **call())) < 1e-6
    verified = encoder.verify([call()])
    for text in (encoder.report(), str(verified), *encoder.stats.against, *verified.against):
        assert "the module itself" not in text.replace("the module itself cannot take these calls", "")
        assert "an eager run of the declared forward" in text


def test_a_wrong_function_that_is_trusted_is_found_by_verify():
    encoder = per_row_encoder(AddsPerItem(), wrong, verify=vg.options.Verify(at_capture=False))
    with pytest.raises(vg.errors.VerificationError, match="from the module itself"):
        encoder.verify([call()])


class Causal(nn.Module):
    """Attention in which no token sees later ones; it makes the mask of four dimensions by itself if it gets none."""

    def forward(self, x, mask, att=None):
        if att is None:
            length = x.shape[1]
            att = torch.ones(length, length, dtype=torch.bool).tril() & mask.bool()[:, None, None]
        return (x @ x.mT).masked_fill(~att[:, 0], -1e9).softmax(-1) @ x


class CausalByDefault(Causal):
    """The same, and calls may leave the mask out."""

    def forward(self, x, mask=None, att=None):
        return super().forward(x, torch.ones(x.shape[:2]) if mask is None else mask, att)


@pytest.mark.parametrize("module", [Causal, CausalByDefault])
def test_buffers_are_compared_with_the_module_whether_or_not_its_argument_has_a_default(module):
    def encoder(**options):
        spec = vg.BufferSpec("x", vg.Mask("mask"), [vg.buffers.AttentionMask("att", **options)])
        return vg.GraphedEncoder(module().eval(), vg.budgets.PaddedLadder(batch=4, length=64), spec, backend="tape")

    call = {"x": torch.randn(2, 7, 8), "mask": torch.ones(2, 7, dtype=torch.long)}
    correct = encoder(causal=True)
    assert distance(correct(**call), correct.module(**call)) < 1e-5
    assert correct.stats.replays.total() == 1
    assert "verified against the module itself" in correct.report()
    other = encoder()
    with pytest.warns(UserWarning, match="failed verification"):
        assert distance(other(**call), other.module(**call)) == 0
    with pytest.raises(vg.errors.VerificationError, match="from the module itself"):
        other.verify([call])


class ScalesItems(nn.Module):
    """Takes a number for each item."""

    def forward(self, x, lengths, scale):
        item = torch.bucketize(torch.arange(len(x), device=x.device), lengths.cumsum(0), right=True)
        return x * scale[item.clamp(max=len(lengths) - 1), None]


class ScalesRows(nn.Module):
    """Takes a number for each row."""

    def forward(self, x, lengths, scale):
        return x * scale[:, None]


@pytest.mark.parametrize(("module", "per_row"), [(ScalesItems, False), (ScalesRows, True)])
def test_entries_of_items_for_each_row_are_compared_with_the_module(module, per_row):
    def encoder(per_row):
        spec = vg.BufferSpec(
            vg.inputs.Rows("x", (8,)), vg.Lengths("lengths"), inputs=[vg.inputs.PerItem("scale", per_row=per_row)]
        )
        return vg.GraphedEncoder(module().eval(), [64], spec, backend="tape")

    call = {"x": rows_for(LENGTHS), "lengths": torch.tensor(LENGTHS), "scale": torch.tensor([1.0, 3.0])}
    expected = call["x"] * call["scale"].repeat_interleave(call["lengths"])[:, None]
    correct = encoder(per_row)
    assert distance(correct(**call), expected) < 1e-5
    assert correct.stats.replays.total() == 1
    if module is ScalesItems:
        with pytest.warns(UserWarning, match="failed verification"):
            assert distance(encoder(True)(**call), expected) == 0


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, classes)

    def forward_features(self, x, scale=1.0):
        return self.linear(x) * scale

    def forward(self, x):
        return self.head(self.forward_features(x))


def classifier(classes=3, backend="tape", **options):
    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Batch(), outputs=vg.outputs.Rows())
    return vg.GraphedEncoder(Classifier(classes).eval(), [16], spec, backend=backend, **options)


@pytest.mark.parametrize("backend", ["tape", "eager"])
@pytest.mark.parametrize("classes", [3, 8])
def test_a_function_that_calls_another_method_never_gets_the_forward_of_the_module(classes, backend):
    encoder = classifier(classes, backend, forward=lambda module, x: module.forward_features(x))
    rows = rows_for([5])
    assert torch.equal(encoder.eager(rows), encoder.module.forward_features(rows))
    for _ in range(2):
        with pytest.raises(
            vg.errors.SpecError, match=r"(?s)other than Classifier.forward, .*method='forward_features'"
        ):
            answer(encoder, x=rows)
    with pytest.raises(vg.errors.SpecError, match="computes something other"):
        answer(encoder, x=rows_for([40]))  # which no budget holds


def test_a_method_is_graphed_and_proven_against_itself():
    encoder, rows = classifier(method="forward_features"), rows_for([5])
    for scale in (1.0, 2.0):
        assert distance(encoder(rows, scale=scale), encoder.module.forward_features(rows, scale)) < 1e-6
        assert torch.equal(encoder.eager(rows, scale=scale), encoder.module.forward_features(rows, scale))
    assert encoder.stats.replays.total() == 2
    assert not encoder.stats.eager
    assert "verified against the module itself" in encoder.report()
    encoder.verify([{"x": rows}])


def test_a_function_in_place_of_a_method_is_proven_against_the_method():
    def doubled(module, x):
        return 2 * module.forward_features(x)

    encoder = classifier(method="forward_features", forward=lambda module, x: module.linear(x))
    encoder(rows_for([5]))
    assert encoder.stats.replays.total() == 1
    with pytest.raises(vg.errors.SpecError, match=r"other than Classifier\.forward_features"):
        answer(classifier(method="forward_features", forward=doubled), x=rows_for([5]))


def test_training_by_a_method_keeps_its_gradients():
    encoder, rows = classifier(method="forward_features"), rows_for([5])
    with torch.enable_grad():
        encoder(rows.requires_grad_()).sum().backward()
    assert distance(rows.grad, encoder.module.linear.weight.sum(0).expand(5, 8)) < 1e-6


@pytest.mark.parametrize("method", ["missing", "linear_", 3, "training"])
def test_a_method_that_is_not_there_is_an_error(method):
    with pytest.raises(vg.errors.SpecError, match="expected the name of a method of Classifier"):
        classifier(method=method)


def test_a_module_that_draws_random_numbers_gives_no_verdict():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Batch())
    encoder = vg.GraphedEncoder(
        Noisy().eval(), [16], spec, forward=lambda module, x: x + torch.rand_like(x), backend="tape"
    )
    assert (answer(encoder, x=rows_for([5])) - rows_for([5])).min() >= 0


def test_who_declares_is_checked():
    with pytest.raises(vg.errors.SpecError, match=r"declared_by='me': expected 'user' or 'recipe'"):
        vg.BufferSpec("x", vg.Lengths(), declared_by="me")


class Gathers(nn.Module):
    """Adds to each row the tensor of its item, whose index it takes, or computes from the lengths."""

    def forward(self, x, lengths, c, item=None):
        if item is None:
            item = torch.arange(len(lengths)).repeat_interleave(lengths)
        return x + c[item]


def test_tensors_of_items_that_are_declared_by_row_reach_the_module_as_the_caller_has_them():
    """Graphs of one item cannot show that the declaration is wrong."""
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", (8,)),
        vg.Lengths(),
        [vg.buffers.DeviceBuffer("item", lambda table: table.row_item)],
        inputs=[vg.inputs.PerItem("c", (8,), per_row=True)],
    )
    module = Gathers()
    encoder = vg.GraphedEncoder(module, [vg.budgets.Budget(16, items=1)], spec, backend="tape")
    for lengths in ([20, 17], [3], [20, 17], [5, 4]):
        x, c = rows_for(lengths), torch.randn(len(lengths), 8)
        assert distance(encoder(x, lengths=lengths, c=c), module(x, torch.tensor(lengths), c)) < 1e-5
