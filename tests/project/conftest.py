"""What pages and examples register is gone after each test."""

import pytest

from varlen_graphs.recipes import registry


@pytest.fixture(autouse=True)
def _recipes_as_they_were():
    before = [dict(names) for names in (registry.RECIPES, registry.RECIPE_NAMES)]
    yield
    for names, kept in zip((registry.RECIPES, registry.RECIPE_NAMES), before, strict=True):
        names.clear()
        names.update(kept)
