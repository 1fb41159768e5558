"""Recipes by the class of the tower."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import nn

from varlen_graphs.doctor.advice import RECIPE_NAMES

Recipe = Callable[..., Any]
"""Function called as `recipe(tower, budgets, **options)` that returns a `GraphedEncoder`."""

R = TypeVar("R", bound=Recipe)


class Method(NamedTuple):
    """Method that an encoder answers, of a model whose towers have no forward that one encoder could replace.

    Attributes:
        name: Name of the method.
        parts: Returns the modules of a model that its encoder runs, as one.
        answer: Called as `answer(model, encoder, original, *args, **kwargs)`, with the method that it replaces.
    """

    name: str
    parts: Callable[[Any], nn.Module]
    answer: Callable[..., Any]


RECIPES: dict[str, Recipe] = {}
"""Registered recipes by class name."""

METHODS: dict[Recipe, Method] = {}
"""Methods that the encoders of some recipes answer, in place of the forward of a tower."""


def register(*class_names: str) -> Callable[[R], R]:
    """Register a recipe for towers of these classes and their subclasses, so that `vg.wrap` finds it.

        @vg.recipes.register("MyVisionTower")
        def my_tower(tower, budgets=None, **options):
            return vg.GraphedEncoder(tower, budgets, buffer_spec=..., forward=..., **options)

    Args:
        *class_names: Names of the classes, without their modules: some come with the weights and cannot be imported. A
            later registration of a name replaces an earlier one.

    Returns:
        A decorator that registers a recipe and returns it unchanged.
    """

    def add(recipe: R) -> R:
        RECIPES.update(dict.fromkeys(class_names, recipe))
        RECIPE_NAMES.update(dict.fromkeys(class_names, recipe.__name__))
        return recipe

    return add


def recipe_for(tower: object) -> Recipe | None:
    """Return the recipe of a tower's class or of the nearest base class, `None` if there is none."""
    return next((RECIPES[cls.__name__] for cls in type(tower).__mro__ if cls.__name__ in RECIPES), None)


def handled() -> list[str]:
    """Return the names of all classes with a recipe, sorted."""
    return sorted(RECIPES)
