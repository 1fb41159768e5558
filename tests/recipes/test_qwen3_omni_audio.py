"""`vg.recipes.qwen3_omni_audio`: the audio tower of Qwen3-Omni."""

from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.encoders import UNVERIFIED
from tests.support.recipe_contract import RecipeContract
from tests.support.towers import distance, equal_bits, qwen3_omni_audio_tower
from varlen_graphs.attention.transformers import use_attention

MASKS = find_spec("transformers.vision_utils")
"""Transformers 4.57 keeps clips and windows apart in FlashAttention 2 alone, in whose place `use_attention` puts ours."""

BUDGETS = [vg.budgets.Budget(512, items=3), vg.budgets.Budget(1024, items=6)]
CLIPS = [250, 37, 100]
CHUNK, WINDOW = 100, 200


def apart(tower):
    """Keep the clips of a tower apart, which its own attention may not do: graphs must equal what it computes."""
    return nullcontext() if MASKS else use_attention(tower)


@pytest.fixture(autouse=True)
def clips_kept_apart():
    with apart(TOWER):
        yield


def clips_of(lengths, seed=0, mel_bins=16):
    return torch.randn(mel_bins, sum(lengths), generator=torch.Generator().manual_seed(seed))


def audio_original(tower):
    def run(features, lengths):
        with torch.no_grad(), apart(tower):
            return tower(features, feature_lens=torch.tensor(lengths))

    return run


TOWER = qwen3_omni_audio_tower()
SHARED = vg.recipes.qwen3_omni_audio(TOWER, BUDGETS, backend="tape")


def test_the_padding_contract_holds():
    SHARED.stats.eager.clear()
    layouts = [
        [1024],  # all frames of the largest budget
        [1],  # the shortest clip there is
        [37],  # shorter than a chunk: the convolutions see the end of the chunk where the clip ends
        [37, 99, 5],
        [CHUNK],
        [WINDOW],
        [2 * WINDOW, 2 * WINDOW],
        [WINDOW + 1, CHUNK - 1, CHUNK + 1],
        [512],  # exactly the smaller budget
        CLIPS,
        [1, 8, 9, 16, 17, 961],  # no clip of padding
    ]
    check_padding_contract(SHARED, audio_original(TOWER), clips_of, "feature_lens", layouts, 1e-5)


lengths = st.one_of(
    st.integers(1, 1200), st.integers(1, CHUNK), st.integers(1, 5).map(lambda n: n * CHUNK), st.just(2 * WINDOW + 1)
)


@settings(max_examples=25)
@given(st.lists(lengths, min_size=1, max_size=12))
def test_any_call_equals_the_original_however_it_is_split(lengths):
    """Also where a replay has short clips alone, which the original convolves as the longest of the call tells it."""
    features = clips_of(lengths)
    expected = audio_original(TOWER)(features, lengths)
    assert distance(SHARED(features, feature_lens=lengths), expected) < 1e-5
    assert distance(SHARED.eager(features, feature_lens=lengths), expected) < 1e-5


@settings(max_examples=100)
@given(st.lists(st.integers(1, 450), min_size=1, max_size=8), st.integers(0, 200), st.integers(0, 3))
def test_there_is_room_for_the_tokens_of_whatever_a_budget_holds(lengths, more_rows, more_items):
    entries = SHARED.spec.outputs.fields["last_hidden_state"]
    budget = vg.budgets.Budget(sum(lengths) + more_rows, len(lengths) + more_items)
    assert sum(map(entries.of_item, lengths)) <= entries.at_budget(budget)


def test_the_call_and_the_output_are_the_towers_own():
    encoder = SHARED
    encoder.stats.eager.clear()
    features, lengths = clips_of(CLIPS), torch.tensor(CLIPS)
    expected = audio_original(TOWER)(features, CLIPS)
    for output in (
        encoder(features, lengths),
        encoder(input_features=features, feature_lens=lengths, return_dict=True),
        encoder(features.double(), feature_lens=CLIPS),
        encoder.eager(features, feature_lens=lengths),
    ):
        assert type(output) is type(expected)
        assert distance(output, expected) < 1e-5
    with encoder.stage(lengths) as stage:
        stage.rows.copy_(features)
    assert equal_bits(stage.output, encoder(features, lengths))
    assert not encoder.stats.eager


def test_the_default_budgets_hold_some_clips_of_some_seconds():
    budgets = vg.recipes.qwen3_omni_audio(TOWER, backend="tape").budgets
    assert [budget.rows for budget in budgets] == list(vg.Ladder().row_counts())
    assert budgets[0].items == 4
    assert budgets[-1].items == 32


@pytest.mark.parametrize(
    ("features", "lengths", "error", "message"),
    [
        (
            clips_of(CLIPS).mT,
            CLIPS,
            vg.errors.InputError,
            r"input_features is \[387, 16\]: expected \[16, rows\], the rows of all",
        ),
        (
            clips_of(CLIPS)[None],
            CLIPS,
            vg.errors.InputError,
            r"input_features is \[1, 16, 387\]: expected \[16, rows\]",
        ),
        (
            clips_of(CLIPS),
            [250, 37],
            vg.errors.LayoutError,
            r"2 items of 287 rows in all, but input_features has 387 rows",
        ),
        (
            clips_of(CLIPS),
            [250, 137, -1],
            vg.errors.LayoutError,
            r"feature_lens\[2\] is -1: every size must be at least 0",
        ),
    ],
)
def test_wrong_input_gets_named_errors(features, lengths, error, message):
    with pytest.raises(error, match=message):
        SHARED(features, feature_lens=lengths)


def test_a_tower_whose_class_hands_on_to_the_original_returns_the_same_fields():
    tower = qwen3_omni_audio_tower()
    expected = audio_original(tower)(clips_of(CLIPS), CLIPS)

    class Same(type(tower)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    tower.__class__ = Same
    encoder = vg.recipes.qwen3_omni_audio(tower, BUDGETS[:1], backend="tape", verify=UNVERIFIED)
    output = encoder(clips_of(CLIPS), feature_lens=CLIPS)
    assert output.keys() == expected.keys()
    assert distance(output, expected) < 1e-5


class TestContract(RecipeContract):
    recipe, budgets, argument = staticmethod(vg.recipes.qwen3_omni_audio), BUDGETS[:1], "feature_lens"
    families, dtypes = ({"seed": 0}, {"seed": 1}), (torch.bfloat16, torch.float16)
    tower, original = staticmethod(qwen3_omni_audio_tower), staticmethod(audio_original)
    adapted, hooked = ("layers.0.self_attn.q_proj", "layers.1.fc1", "ln_post"), "layers.1"

    def example(self):
        return clips_of(CLIPS), CLIPS
