"""Tests that hold for every recipe: half precision, adapters, weights that change in place, hooks."""

import copy
from abc import ABC, abstractmethod
from itertools import product

import torch

from tests.support.contract import check_half_precision
from tests.support.encoders import UNVERIFIED
from tests.support.towers import adapt, distance


class RecipeContract(ABC):
    """A subclass, beside the other tests of a recipe, says what it runs.

    Attributes:
        recipe: The recipe, a function of a tower and budgets.
        budgets: Budgets that hold the example.
        argument: Name of the argument that describes the items.
        families: Arguments of `tower` for each family of towers.
        dtypes: Half precisions.
        adapted: Paths of layers that adapters replace.
        hooked: End of the path of a part with a hook.
    """

    families = ({},)
    dtypes = (torch.bfloat16,)

    @abstractmethod
    def tower(self, dtype=torch.float32, **family):
        """Return a tower, the same each time."""

    @abstractmethod
    def example(self):
        """Return the rows and the items of a call."""

    def arguments(self, items):
        """Return what calls of the encoder take beside the rows."""
        return {self.argument: items}

    @abstractmethod
    def original(self, tower):
        """Return a function of rows and items that runs a tower without an encoder."""

    def encoder(self, tower):
        return self.recipe(tower, self.budgets, backend="tape", verify=UNVERIFIED)

    def test_half_precision_is_as_close_to_float32_as_the_original(self):
        rows, items = self.example()
        for family, dtype in product(self.families, self.dtypes):
            tower = self.tower(dtype=dtype, **family)
            exact, half = copy.deepcopy(tower).float(), rows.to(dtype)
            output = self.encoder(tower)(half, **self.arguments(items))
            eager, expected = self.original(tower)(half, items), self.original(exact)(half.float(), items)
            check_half_precision(output, eager, expected, dtype)

    def test_adapters_are_called_and_weights_that_change_in_place_are_followed(self):
        """In a tower of a subclass, which is in another file."""
        tower, (rows, items) = self.tower(), self.example()
        tower.__class__ = type("Mine", (type(tower),), {"__module__": __name__})
        for path in self.adapted:
            adapt(tower, path)
        encoder = self.encoder(tower.eval())
        before, expected = encoder(rows, **self.arguments(items)), self.original(tower)(rows, items)
        assert type(before) is type(expected)
        assert distance(before, expected) < 1e-5
        with torch.no_grad():
            for parameter in tower.parameters():
                parameter.mul_(0.9)
        after = encoder(rows, **self.arguments(items))
        assert distance(after, before) > 0.01
        assert distance(after, self.original(tower)(rows, items)) < 1e-5
        assert not encoder.stats.eager

    def test_hooks_see_the_original_run(self):
        tower, (rows, items), seen = self.tower(), self.example(), []
        encoder = self.encoder(tower)
        rows = rows.nan_to_num()
        part = next(part for name, part in tower.named_modules() if name.endswith(self.hooked))
        hook = part.register_forward_hook(lambda *_: seen.append(1))
        output = encoder(rows, **self.arguments(items))
        hook.remove()
        assert seen == [1]
        assert encoder.stats.eager == {"forward hooks": 1}
        with torch.no_grad():
            expected = tower(rows, **{name: torch.as_tensor(one) for name, one in self.arguments(items).items()})
        assert distance(output, expected) < 1e-6
