"""Which recipe is for which tower."""

from collections.abc import Callable
from typing import Any, TypeVar

Recipe = Callable[..., Any]
"""Called as `recipe(tower, budgets, **options)`, and gives a `GraphedEncoder`."""

R = TypeVar("R", bound=Recipe)

_RECIPES: dict[str, Recipe] = {}


def handles(*class_names: str) -> Callable[[R], R]:
    """Declare that a recipe is for towers of these classes, and of classes derived from them: `vg.wrap` finds it.

        @vg.recipes.handles("MyVisionTower")
        def my_tower(tower, budgets=None, **options):
            return vg.GraphedEncoder(tower, budgets or vg.Ladder(), buffer_spec=..., forward=..., **options)

    Classes go by their names, because some come with the weights and have no module to import them from. A later
    declaration takes the place of an earlier one.
    """

    def declare(recipe: R) -> R:
        _RECIPES.update(dict.fromkeys(class_names, recipe))
        return recipe

    return declare


def recipe_for(tower: object) -> Recipe | None:
    """The recipe for a tower, if there is one."""
    return next((_RECIPES[cls.__name__] for cls in type(tower).__mro__ if cls.__name__ in _RECIPES), None)


def handled() -> list[str]:
    """The classes that there are recipes for."""
    return sorted(_RECIPES)
