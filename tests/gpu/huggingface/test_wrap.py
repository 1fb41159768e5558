"""Whole models on a GPU: the same tokens with graphs in them."""

import copy

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.whole_models import WHOLE, prompt, prompts, scores, tokens, whole_model

pytestmark = on_gpus()

IMAGES, VIDEOS = [(1, 8, 8), (1, 4, 6)], [(2, 4, 4)]


@pytest.fixture(autouse=True)
def convolutions_in_float32():
    """By default cuDNN runs those of the original in TF32, where patches are embedded by a matrix product here."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


TIE = 0.05
"""How much of the spread of all scores two correct attention kernels may move one of them in bfloat16."""


def assert_same_tokens(got, expected):
    """The same choices, but for the first at which the model itself found two about as good: then the texts part."""
    (chosen, _), (chosen_before, seen_before) = got, expected
    differ = (chosen != chosen_before).nonzero()
    if differ.numel():
        first = differ[0, 0]
        gap = seen_before[first, chosen_before[first]] - seen_before[first, chosen[first]]
        assert gap < TIE * seen_before[first].std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", WHOLE)
def test_a_wrapped_model_generates_the_same_tokens(family, dtype):
    model = whole_model(family, dtype=dtype, device="cuda")
    shown = prompts(model, IMAGES, VIDEOS)
    expected = [scores(model, inputs) for inputs in shown]
    vg.wrap(model, [128, 256])
    for inputs, before in zip(shown, expected, strict=True):
        got = scores(model, inputs)
        if dtype == torch.float32:
            assert torch.equal(got[0], before[0])
        else:
            assert_same_tokens(got, before)
    (encoder,) = (one for path, one in vg.encoders(model).items() if path.endswith("visual"))
    assert encoder.stats.replays.total() >= sum(name.startswith("pixel_values") for inputs in shown for name in inputs)
    assert not encoder.stats.eager
    vg.unwrap(model)
    for inputs, (chosen, seen) in zip(shown, expected, strict=True):
        again, seen_again = scores(model, inputs)
        assert torch.equal(again, chosen)
        assert torch.equal(seen_again, seen)


def test_a_copy_captures_graphs_of_its_own():
    model = vg.wrap(whole_model(device="cuda"), [128])
    inputs = prompt(model, IMAGES)
    expected = tokens(model, inputs)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.model.visual.merger.linear_fc2.weight.zero_()
    assert torch.equal(tokens(other, inputs), expected)
    assert not torch.equal(tokens(model, inputs), expected)
    vg.unwrap(model)
    assert torch.equal(tokens(other, inputs), expected)


def test_a_model_that_was_moved_to_the_gpu_after_the_wrap_is_graphed_there():
    model = vg.wrap(whole_model(), [128]).to("cuda")
    inputs = prompt(model, IMAGES)
    graphed = tokens(model, inputs)
    assert not vg.encoders(model)["model.visual"].stats.eager
    assert torch.equal(tokens(vg.unwrap(model), inputs), graphed)
