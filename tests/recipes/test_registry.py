"""Recipes are found by their names, and by the classes of towers, and refuse other towers."""

import pkgutil

import pytest
from torch import nn

import varlen_graphs as vg
from varlen_graphs.recipes import registry


def test_the_recipes_of_all_files_of_the_package_are_registered():
    files = [name for _, name, _ in pkgutil.walk_packages(vg.recipes.__path__, "varlen_graphs.recipes.")]
    own = {recipe for recipe in registry.RECIPES.values() if recipe.__module__ in files}
    assert len(own) >= 6
    assert all(getattr(vg.recipes, recipe.__name__) is recipe for recipe in own)
    assert all(getattr(vg.recipes, name) for name in vg.recipes.__all__)


EXPECTED = {
    "cosmos3_edge": ".* expected the vision tower of",
    "gemma4": ".*'patch_embedder'.* expected the vision tower of Gemma 4",
    "glm4v": r"\['patch_embed'.*vision tower of GLM-4.1V",
    "glm_image": ".* expected the vision tower of",
    "hunyuan_vl": ".* expected the vision tower of",
    "idefics": ".*'embeddings'.* expected the vision tower of Idefics 2",
    "inkling2": ".* expected the vision tower of Inkling",
    "lfm3_vl": ".* expected the vision tower of",
    "minicpmv4_6": ".* expected the vision tower of MiniCPM-V 4.6",
    "pixtral": ".*'patch_conv'.* expected Pixtral's vision tower",
    "qwen2_5_vl": ".*'patch_embed'.* expected the vision tower of Qwen2",
    "qwen2_vl": ".*'patch_embed'.* expected the vision tower of Qwen2",
    "qwen3_asr": ".* expected the audio tower of Qwen3-ASR",
    "qwen3_omni_audio": ".*'conv2d1'.* expected the audio tower of Qwen3-Omni",
    "radio": ".* expected C-RADIO",
    "siglip2": ".*'embeddings'.* expected the vision tower of SigLIP 2",
    "video_llama3": ".* expected the vision tower of",
}
"""What recipes say to a module that has nothing of their tower, after its class."""


@pytest.mark.parametrize("recipe", EXPECTED)
def test_another_tower_is_refused(recipe):
    with pytest.raises(vg.errors.SpecError, match=f"Linear has no {EXPECTED[recipe]}"):
        getattr(vg.recipes, recipe)(nn.Linear(2, 2))


def test_a_recipe_is_for_subclasses_too_and_the_latest_registration_counts(monkeypatch):
    monkeypatch.setattr(registry, "RECIPES", {**registry.RECIPES})

    class Base(nn.Linear):
        pass

    class Derived(Base):
        pass

    first = vg.recipes.register("Base", "Other")(lambda tower, budgets=None, **options: None)
    assert registry.recipe_for(Derived(1, 1)) is registry.recipe_for(Base(1, 1)) is first
    assert registry.recipe_for(nn.Linear(1, 1)) is None
    second = vg.recipes.register("Base")(lambda tower, budgets=None, **options: None)
    assert registry.recipe_for(Derived(1, 1)) is second
    assert {"Base", "Other"} <= {*registry.handled()}
