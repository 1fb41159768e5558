"""Towers whose patches begin with their line and column, unmodified: Pix2Struct and Kosmos 2.5."""

import importlib

import pytest
import torch

import varlen_graphs as vg
from tests.support.towers import distance, equal_bits
from varlen_graphs.recipes.flattened_patches import flattened_patches

pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {
    "pix2struct": {**SMALL, "d_kv": 8, "d_ff": 32, "seq_len": 64, "patch_embed_hidden_size": 12},
    "kosmos2_5": {**SMALL, "head_dim": 8, "max_num_patches": 64, "patch_embed_hidden_size": 12},
}
CLASSES = {"pix2struct": "Pix2StructVision", "kosmos2_5": "Kosmos2_5Vision"}
"""Beginnings of the names of configurations and towers, by the names of their files."""

BUDGETS = [vg.Budget.padded(2, 16), vg.Budget.padded(4, 48)]


@pytest.fixture(params=CLASSES)
def tower(request):
    kind, name = request.param, CLASSES[request.param]
    path = f"transformers.models.{kind}"
    file = pytest.importorskip(f"{path}.modeling_{kind}", reason=f"this version of transformers has no {kind}")
    configs = importlib.import_module(f"{path}.configuration_{kind}")
    torch.manual_seed(0)
    config = getattr(configs, f"{name}Config")(**SIZES[kind])
    return getattr(file, f"{name}Model")._from_config(config).eval()


def batch(sizes, spare=0, seed=0):
    """Patches of images of these sizes behind their positions, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.zeros(len(sizes), max(h * w for h, w in sizes) + spare, 14)
    for own, (h, w) in zip(patches, sizes, strict=True):
        place = torch.arange(h * w)
        own[: h * w] = torch.randn(h * w, 14, generator=generator)
        own[: h * w, 0], own[: h * w, 1] = place // w + 1, place % w + 1
    return patches


CALLS = [[(3, 4)], [(2, 3), (4, 3)], [(5, 7), (1, 1), (4, 8)], [(3, 3)] * 4, [(6, 8)]]


def test_outputs_are_those_of_the_tower_padding_included(tower):
    encoder = flattened_patches(tower, BUDGETS, backend="tape").capture()
    with torch.no_grad():
        for seed, sizes in enumerate(CALLS):
            for spare in (0, 3):
                patches = batch(sizes, spare * (len(sizes) < 4 and spare < 48 - 45), seed)
                expected = tower(patches)
                encoder.poison()
                over_nan = encoder(patches)
                encoder(batch([(6, 8)] * 4, seed=99))
                again = encoder(flattened_patches=patches, attention_mask=(patches.sum(-1) != 0).float())
                assert type(over_nan) is type(expected)
                assert over_nan.last_hidden_state.shape == expected.last_hidden_state.shape
                assert distance(over_nan.last_hidden_state, expected.last_hidden_state) < 1e-5
                assert equal_bits(again.last_hidden_state, over_nan.last_hidden_state)
    assert not encoder.stats.eager


def test_calls_that_graphs_cannot_answer_run_the_tower(tower):
    encoder = flattened_patches(tower, BUDGETS, backend="tape").capture()
    patches = batch([(2, 3), (4, 3)])
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


def test_wrap_finds_it_and_states_of_layers_are_graphed(tower):
    with torch.no_grad():
        patches = batch([(2, 3), (4, 3)])
        expected = tower(patches, output_hidden_states=True)
        wrapped = vg.wrap(tower, BUDGETS, backend="tape")
        for _ in range(2):
            got = wrapped(patches, output_hidden_states=True)
        assert distance(got.last_hidden_state, expected.last_hidden_state) < 1e-5
        for one, other in zip(got.hidden_states or (), expected.hidden_states or (), strict=True):
            assert distance(one, other) < 1e-5
    assert vg.encoders(wrapped).how == {"": "flattened_patches"}


def test_other_towers_are_refused():
    with pytest.raises(vg.SpecError, match="embeddings"):
        flattened_patches(torch.nn.Linear(2, 2))
