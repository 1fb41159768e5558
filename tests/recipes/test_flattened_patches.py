"""Towers whose patches begin with their line and column, unmodified: Pix2Struct and Kosmos 2.5."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.towers import distance, equal_bits
from varlen_graphs.recipes.automatic.flattened_patches import flattened_patches

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support.patches import BUDGETS, CLASSES, check_patches, patches_of, patches_tower


@pytest.fixture(params=CLASSES)
def tower(request):
    return patches_tower(request.param)


def test_outputs_are_those_of_the_tower_padding_included(tower):
    check_patches(flattened_patches(tower, BUDGETS, backend="tape"))


def test_calls_that_graphs_cannot_answer_run_the_tower(tower):
    encoder = flattened_patches(tower, BUDGETS, backend="tape").capture()
    patches = patches_of([(2, 3), (4, 3)])
    empty, scores = patches.clone(), (patches.sum(-1) != 0).float()
    empty[1] = 0
    calls = [
        ({"flattened_patches": empty}, "attention_mask of another form, or an image without patches"),
        ({"flattened_patches": patches, "attention_mask": scores / 2}, "attention_mask of another form, or an image"),
        ({"flattened_patches": patches, "output_attentions": True}, "argument 'output_attentions'"),
    ]
    with torch.no_grad():
        for call, reason in calls:
            encoder.stats.eager.clear()
            assert equal_bits(encoder(**call).last_hidden_state, tower(**call).last_hidden_state)
            ((found, count),) = encoder.stats.eager.items()
            assert found.startswith(reason)
            assert count == 1
        if type(tower).__name__ == "Pix2StructVisionModel":  # the other one does not run with it
            tower.config.return_dict = False
            encoder.stats.eager.clear()
            assert isinstance(encoder(patches), tuple)
            assert encoder.stats.eager == {"config.return_dict=False": 1}


def test_positions_are_never_rounded_by_a_cast(tower):
    encoder = flattened_patches(tower.bfloat16(), BUDGETS, backend="tape")
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        encoder(patches_of([(2, 3)]))  # as the tower does
    assert encoder.stats.eager == {"flattened_patches of another dtype": 1}


def test_wrap_finds_it_and_states_of_layers_are_graphed(tower):
    with torch.no_grad():
        patches = patches_of([(2, 3), (4, 3)])
        expected = tower(patches, output_hidden_states=True)
        wrapped = vg.wrap(tower, BUDGETS, backend="tape")
        for _ in range(2):
            got = wrapped(patches, output_hidden_states=True)
        assert distance(got.last_hidden_state, expected.last_hidden_state) < 1e-5
        for one, other in zip(got.hidden_states or (), expected.hidden_states or (), strict=True):
            assert distance(one, other) < 1e-5
    assert vg.encoders(wrapped).how == {"": "flattened_patches"}


def test_a_tower_that_a_mask_of_its_patches_changes_is_refused(tower):
    class Doubles(type(tower)):
        def forward(self, flattened_patches, attention_mask=None, **kwargs):
            out = super().forward(flattened_patches, attention_mask=attention_mask, **kwargs)
            out.last_hidden_state = out.last_hidden_state * (1 if attention_mask is None else 2)
            return out

    tower.__class__ = Doubles
    with pytest.raises(vg.errors.SpecError, match=r"^output.last_hidden_state of item \d, .* differs from the tower's"):
        flattened_patches(tower, BUDGETS, backend="tape")


def test_other_towers_are_refused():
    with pytest.raises(vg.errors.SpecError, match="embeddings"):
        flattened_patches(torch.nn.Linear(2, 2))
