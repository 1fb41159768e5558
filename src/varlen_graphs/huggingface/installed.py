"""An encoder in the place of a tower's forward."""

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from varlen_graphs.capture.pool import Pool
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.layout.budgets import Budgets
from varlen_graphs.recipes.registry import Recipe

PLACES = ("forward", "_old_forward")
"""Where a forward is found: accelerate puts one of its own around a module's, and keeps what it found in the second."""


class Pools(dict[torch.device, Pool]):
    """The pools that the encoders of a model share, one a device; a pickle gets others, shared likewise."""

    def __reduce__(self) -> Any:
        return Pools, ()


class Installed:
    """Stands in the place of a tower's forward, and makes the encoder at its first use.

    Until then the model may be moved, cast, put into eval mode or given adapters. A copy or a pickle of the tower gets
    one of its own, nothing captured yet. The tower stays the object it is: its class, hooks, names of parameters and
    keys of its state dict do not change, because this is no module.

    Args:
        module: The tower.
        recipe: Makes the encoder.
        budgets: For the recipe.
        options: For the recipe.
        pools: Where the encoder's graphs are captured.
        before: What was in its place, if that was not the forward of the tower's class.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        budgets: Budgets | None,
        options: dict[str, Any],
        pools: Pools,
        before: Callable[..., Any] | None,
    ) -> None:
        self.module = module
        self._recipe = recipe
        self._budgets = budgets
        self._options = options
        self._pools = pools
        self._before = before
        self._encoder: GraphedEncoder | None = None
        self._making = threading.Lock()
        self.__signature__ = inspect.signature(self._original)

    @property
    def _original(self) -> Callable[..., Any]:
        bound: Callable[..., Any] = self._before or type(self.module).forward.__get__(self.module)
        return bound

    @property
    def encoder(self) -> GraphedEncoder:
        """The encoder, made now if there is none yet."""
        if self._encoder is None:
            with self._making:
                self._encoder = self._encoder or self._make()
        return self._encoder

    def _make(self) -> GraphedEncoder:
        with self._absent():
            pool = self._pools.setdefault(next(self.module.parameters()).device, Pool())
            encoder: GraphedEncoder = self._recipe(self.module, self._budgets, **({"pool": pool} | self._options))
            return encoder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode."""
        return self.encoder(*args, **kwargs)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets

    def remove(self) -> None:
        """Put back what was there, and free the graphs."""
        own = vars(self.module)
        place = next(name for name in PLACES if own.get(name) is self)
        if self._before is None and place == "forward":
            del own[place]
        else:
            own[place] = self._original
        if self._encoder is not None:
            self._encoder.release()

    @contextmanager
    def _absent(self) -> Iterator[None]:
        """Show the tower's own forward to an encoder that keeps it for what no graph can do."""
        own = vars(self.module)
        forward = own["forward"]
        own["forward"] = self._original
        try:
            yield
        finally:
            own["forward"] = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> "Installed":
        module, before = copy.deepcopy((self.module, self._before), memo)
        return Installed(module, self._recipe, self._budgets, self._options, self._pools, before)

    def __reduce__(self) -> Any:
        options = {name: value for name, value in self._options.items() if name != "pool"}
        return Installed, (self.module, self._recipe, self._budgets, options, self._pools, self._before)


def install(
    module: nn.Module, recipe: Recipe, budgets: Budgets | None, options: dict[str, Any], pools: Pools
) -> Installed:
    """Put an encoder in the place of a tower's forward; inside of what accelerate put there."""
    own = vars(module)
    place = PLACES["_hf_hook" in own]
    own[place] = made = Installed(module, recipe, budgets, options, pools, own.get(place))
    return made


def installed(module: nn.Module) -> Installed | None:
    """What was put in the place of a module's forward, if it was."""
    found = (vars(module).get(name) for name in PLACES)
    return next((one for one in found if isinstance(one, Installed)), None)
