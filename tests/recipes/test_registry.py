"""Recipes are found by their names, and by the classes of towers."""

import pkgutil
import subprocess
import sys

from torch import nn

import varlen_graphs as vg
from varlen_graphs.recipes import registry


def test_importing_the_package_registers_the_recipes_of_all_its_files():
    files = [name for _, name, _ in pkgutil.walk_packages(vg.recipes.__path__, "varlen_graphs.recipes.")]
    code = f"import sys, varlen_graphs; left = {{*{files}}} - {{*sys.modules}}; assert not left, left"
    subprocess.run([sys.executable, "-c", code], check=True)
    own = {recipe for recipe in registry.RECIPES.values() if recipe.__module__ in files}
    assert len(own) >= 6
    assert all(getattr(vg.recipes, recipe.__name__) is recipe for recipe in own)
    assert all(getattr(vg.recipes, name) for name in vg.recipes.__all__)


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
