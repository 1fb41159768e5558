"""An encoder installed in place of a tower's forward."""

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
"""Instance attributes that hold a forward: accelerate replaces the first, and keeps what it replaced in the second."""


class Pools(dict[torch.device, Pool]):
    """Pools by device, shared by the encoders of a model. Pickled as an empty dict: a copied model gets new pools."""

    def __reduce__(self) -> Any:
        return Pools, ()


class Installed:
    """Callable in place of a tower's forward; makes the encoder at its first use.

    Until then the model may be moved, cast, put in eval mode or given adapters. A copy or a pickle of the tower gets an
    `Installed` of its own, with nothing captured. This is not an `nn.Module`, and it holds the encoder in a plain
    attribute, so the tower's class, hooks, parameter names and state dict keys do not change. `before` is the callable
    that it replaces, `None` for the forward of the tower's class.
    """

    def __init__(
        self, module: nn.Module, recipe: Recipe, budgets: Budgets | None, options: dict[str, Any], pools: Pools,
        before: Callable[..., Any] | None,
    ) -> None:  # fmt: skip
        self.module = module
        self._recipe = recipe
        self._budgets = budgets
        self._options = options
        self._pools = pools
        self._before = before
        self._encoder: GraphedEncoder | None = None
        self._lock = threading.Lock()
        self.__signature__ = inspect.signature(self._original)

    @property
    def _original(self) -> Callable[..., Any]:
        bound: Callable[..., Any] = self._before or type(self.module).forward.__get__(self.module)
        return bound

    @property
    def encoder(self) -> GraphedEncoder:
        """Encoder of the tower, made at the first access."""
        if self._encoder is None:
            with self._lock:
                self._encoder = self._encoder or self._make()
        return self._encoder

    def _make(self) -> GraphedEncoder:
        with self._without_encoder():
            pool = self._pools.setdefault(next(self.module.parameters()).device, Pool())
            encoder: GraphedEncoder = self._recipe(self.module, self._budgets, **({"pool": pool} | self._options))
            return encoder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode."""
        return self.encoder(*args, **kwargs)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets

    def remove(self) -> None:
        """Restore what was replaced, and free the graphs."""
        own = vars(self.module)
        place = next(name for name in PLACES if own.get(name) is self)
        if self._before is None and place == "forward":
            del own[place]
        else:
            own[place] = self._original
        if self._encoder is not None:
            self._encoder.release()

    @contextmanager
    def _without_encoder(self) -> Iterator[None]:
        """Restore the tower's own forward inside the block: an encoder made there keeps it for eager calls."""
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
    """Install an encoder in place of a tower's forward; if accelerate has replaced it, inside of accelerate's."""
    own = vars(module)
    place = PLACES["_hf_hook" in own]
    own[place] = encoder = Installed(module, recipe, budgets, options, pools, own.get(place))
    return encoder


def installed(module: nn.Module) -> Installed | None:
    """Return what is installed in place of a module's forward, `None` if nothing is."""
    forwards = (vars(module).get(name) for name in PLACES)
    return next((forward for forward in forwards if isinstance(forward, Installed)), None)
