"""`MostlyEager`: a warning where most of the last calls ran eager: once for each reason, with what to do."""

import contextlib
import warnings

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import Attention, Of, attention_encoder, attention_spec, encoder_of, rows_for

SHAPED = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))


def calls(encoder, count, lengths=(20,), **arguments):
    """Make calls, and return the warnings that told that most of the last ones ran eager."""
    rows = rows_for(lengths)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(count):
            encoder(rows, lengths=[*lengths], **arguments)
    return [str(one.message) for one in told if "of the last 100 calls" in str(one.message)]


def test_calls_that_no_budget_holds_are_told_once_with_the_budgets():
    encoder = attention_encoder(spec=SHAPED)
    assert not calls(encoder, 20)
    assert not calls(encoder, 89, [300])
    (told,) = calls(encoder, 1, [300])
    assert (
        "90 of the last 100 calls of Attention ran eager, 90 of them for this reason: larger than every budget" in told
    )
    assert f"the largest budget is {encoder.budgets[-1]}: give the encoder budgets that hold such calls" in told
    assert not calls(encoder, 300, [300])


def test_an_item_that_no_budget_holds_beside_others_counts_as_its_call():
    encoder = attention_encoder(spec=SHAPED)
    assert len(calls(encoder, 100, [20, 300, 300])) == 1
    assert encoder.stats.eager == {"larger than every budget": 200}


def test_fewer_eager_calls_are_not_told():
    encoder = attention_encoder(spec=SHAPED)
    for _ in range(40):
        assert not calls(encoder, 8, [300])
        assert not calls(encoder, 1)  # 89 of 100


def with_hook(encoder):
    encoder.module.register_forward_hook(lambda *args: None)


@contextlib.contextmanager
def in_training(encoder):
    encoder.module.requires_grad_(False).train()
    yield
    encoder.module.eval()


@pytest.mark.parametrize(
    ("state", "reason", "remedy"),
    [
        (with_hook, "forward hooks", "replays run no hooks: remove them"),
        (in_training, "training mode differs from construction", "call eval() on the module"),
        (lambda _: torch.autocast("cpu", torch.bfloat16), "autocast differs from construction", "make it in the state"),
    ],
)
def test_each_state_that_runs_calls_eager_is_told(state, reason, remedy):
    encoder = attention_encoder(module=Attention(), spec=SHAPED).capture()
    with state(encoder) or contextlib.nullcontext():
        (told,) = calls(encoder, 200)
    assert f"for this reason: {reason}; " in told
    assert remedy in told


def test_what_only_the_module_can_answer_is_told():
    class Asked(Attention):
        def forward(self, x, cu_seqlens, max_seqlen, output_attentions=None):
            return super().forward(x, cu_seqlens, max_seqlen)

    (told,) = calls(attention_encoder(module=Asked(), spec=SHAPED), 100, output_attentions=True)
    assert "output_attentions=True; only the module itself answers such calls: leave out what they ask for" in told


def test_a_lazy_encoder_is_told_of_if_nobody_captures():
    doubles, lazy = Of(lambda module, x, lengths=None: x * 2), vg.options.Capture(lazy=True)
    forgotten, served = (encoder_of(doubles, capture=lazy) for _ in range(2))
    assert not calls(forgotten, 1000)  # the first calls run eager on purpose
    (told,) = calls(forgotten, 200)
    assert "not captured yet; nobody captures what calls request: call encoder.capture_in_background()" in told
    calls(served, 10)
    served.capture_pending()
    assert not calls(served, 2000, [90])  # is requested, and will be captured


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"eager_if": lambda module: "another mode"}])
def test_what_was_asked_for_is_not_told(options):
    assert not calls(attention_encoder(spec=SHAPED, **options), 300)


def test_nothing_is_told_where_the_library_is_disabled_or_the_module_trained(monkeypatch):
    encoder = attention_encoder(module=Attention(), spec=SHAPED)
    encoder.module.train()
    with torch.enable_grad():
        assert not calls(encoder, 200)
    encoder.module.eval()
    monkeypatch.setenv("VARLEN_GRAPHS_DISABLE", "1")
    assert not calls(encoder, 200)
