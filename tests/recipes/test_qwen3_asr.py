"""The audio tower of Qwen3-ASR: batches of clips, padded to whole chunks."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED
from tests.support.qwen3_asr import asr_tower, clips
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import distance, equal_bits

BUDGETS = [vg.budgets.Budget(4, items=3), vg.budgets.Budget(8, items=6)]
LENGTHS = [230, 99, 301]


@functools.cache
def shared():
    """Return a tower and its encoder, for tests that change neither."""
    tower = asr_tower()
    return tower, vg.recipes.qwen3_asr(tower, BUDGETS, backend="tape")


def original(tower, *call, **asked):
    with torch.no_grad():
        return tower(*call, **asked)


@pytest.mark.parametrize(
    "lengths", [[800], [1], [40], LENGTHS, [400], [300, 300], [100] * 6, [1, 100, 101], [7, 0, 230]], ids=str
)
def test_the_padding_contract_holds(lengths):
    """What the tower reads past the end of a clip is input; what is past the last chunk of a budget is padding."""
    tower, encoder = shared()
    call, eager = clips(lengths), encoder.stats.eager.copy()
    encoder(*call)
    encoder.poison()
    over_nan = encoder(*call)
    encoder(*clips([800], seed=9))
    assert equal_bits(encoder(*call), over_nan)
    assert distance(over_nan, original(tower, *call)) < 1e-5
    assert encoder.stats.eager == eager


@settings(max_examples=8)
@given(st.lists(st.integers(0, 450), min_size=1, max_size=8).filter(any), st.integers(0, 2), st.booleans())
def test_any_call_equals_the_original_however_it_is_padded_and_split(lengths, more, asks):
    tower, encoder = shared()
    call, asked = clips(lengths, more=more), {"output_hidden_states": True} if asks else {}
    assert distance(encoder(*call, **asked), original(tower, *call, **asked)) < 1e-5


def test_the_call_and_the_output_are_the_towers_own():
    tower, encoder = shared()
    x, mask = clips(LENGTHS)
    expected = original(tower, x, mask)
    for output in (
        encoder(x, mask),
        encoder(x, input_features_mask=mask.bool()),
        encoder(input_features=x.double(), input_features_mask=mask.float()),
    ):
        assert type(output) is type(expected)
        assert distance(output, expected) < 1e-5
    assert "verified against the module itself" in encoder.report()


def test_chunks_of_padding_alone_are_not_computed():
    encoder = vg.recipes.qwen3_asr(shared()[0], BUDGETS, backend="tape", verify=UNVERIFIED)
    encoder(*clips([90, 110, 10], more=20))
    assert (encoder.stats.rows, encoder.stats.padding) == (4, 0)


def test_the_tower_answers_what_graphs_do_not_take():
    tower = asr_tower()
    encoder = vg.recipes.qwen3_asr(tower, BUDGETS, backend="tape", verify=UNVERIFIED)
    x, mask = clips(LENGTHS)
    from_left, none = mask.clone(), torch.zeros_like(mask)
    from_left[0, 0] = 0
    for odd in (from_left, from_left.bool()):
        assert distance(encoder(x, odd), original(tower, x, odd)) == 0
    with pytest.raises(RuntimeError):
        original(tower, x, none)
    with pytest.raises(RuntimeError):
        encoder(x, none)
    ((reason, count),) = encoder.stats.eager.items()
    assert (reason, count) == ("input_features_mask does not mark the first frames of clips of whole chunks", 3)
    for wrong in ((x[..., :-1], mask[:, :-1]), (x, mask[:2]), (x[0], mask), (x, None)):
        with pytest.raises((ValueError, RuntimeError, AttributeError, TypeError)):
            encoder(*wrong)
    encoder(x, mask, output_attentions=True)
    assert encoder.stats.eager["output_attentions=True"] == 1


def test_training_runs_the_tower_with_its_gradients():
    tower = asr_tower()
    encoder = vg.recipes.qwen3_asr(tower, BUDGETS, backend="tape", verify=UNVERIFIED)
    tower.train()
    with torch.enable_grad():
        encoder(*clips(LENGTHS)).last_hidden_state.sum().backward()
    assert all(parameter.grad is not None for parameter in tower.layers.parameters())
    tower.eval()
    assert not encoder.module.training


def test_wrap_puts_it_in_the_place_of_the_towers_forward():
    model = nn.ModuleDict({"audio_tower": asr_tower(), "head": nn.Linear(2, 2)})
    tower, (x, mask) = model["audio_tower"], clips(LENGTHS)
    from_left = mask.clone()
    from_left[0, 0] = 0
    expected, odd = original(tower, x, mask), original(tower, x, from_left)
    vg.wrap(model, BUDGETS[1:], backend="tape", verify=UNVERIFIED)
    assert distance(original(tower, x, mask), expected) < 1e-5
    assert distance(original(tower, x, from_left), odd) == 0
    encoder = vg.encoders(model)["audio_tower"]
    assert encoder.stats.replays.total() == 1
    assert encoder.stats.eager.total() == 1
    vg.unwrap(model)
    assert equal_bits(original(tower, x, mask), expected)


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.qwen3_asr), BUDGETS[1:], "input_features_mask"
    dtypes = torch.bfloat16, torch.float16
    adapted, hooked = ("conv2d2", "layers.1.self_attn.v_proj", "layers.2.fc1", "ln_post"), "layers.1"
    tower = staticmethod(asr_tower)

    def example(self):
        return clips(LENGTHS)

    def original(self, tower):
        return functools.partial(original, tower)
