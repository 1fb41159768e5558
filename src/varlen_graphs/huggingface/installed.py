"""An encoder installed in place of a tower's forward."""

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.capture.pool import Pool, inside_capture
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import CaptureError, CompilerError, InputError, LayoutError, SpecError, warn
from varlen_graphs.layout.budgets import Budgets
from varlen_graphs.recipes.registry import METHODS, Method, Recipe

PLACES = ("forward", "_old_forward")
"""Instance attributes that hold a forward: accelerate replaces the first, and keeps what it replaced in the second."""


NOT_UNDERSTOOD = "arguments that vg.wrap did not understand"
"""Reason of eager runs of calls that the encoder of a tower without a recipe refuses."""

NOT_CAPTURED = "its capture failed"
"""Reason of eager runs of a tower without a recipe after its first capture failed."""


class Understood(NamedTuple):
    """A tower that can be graphed.

    Attributes:
        module: The tower.
        recipe: The recipe that graphs it.
        declared: True if the recipe is for its class, False if it was found by trying.
        options: Options of the recipe that follow from the model around the tower.
    """

    module: nn.Module
    recipe: Recipe
    declared: bool
    options: Mapping[str, Any]

    @property
    def method(self) -> Method | None:
        """The method that its encoder answers; `None` if that is its forward."""
        return METHODS.get(self.recipe)

    @property
    def name(self) -> str:
        """Name of what its encoder answers."""
        return "forward" if self.method is None else self.method.name

    @property
    def parts(self) -> nn.Module:
        """The modules that its encoder runs."""
        return self.module if self.method is None else self.method.parts(self.module)


class Shared(dict[torch.device, Pool]):
    """Pools by device, shared by the encoders of a model. Pickled without them: a copied model gets new pools.

    Attributes:
        eager: Why modules that look like towers stay eager, by their paths in the model.
    """

    def __init__(self, eager: Mapping[str, str]) -> None:
        super().__init__()
        self.eager = dict(eager)

    def __reduce__(self) -> Any:
        return Shared, (self.eager,)


class Installed:
    """Callable in place of a tower's forward, or of a `Method` of a model; makes the encoder at its first use.

    Until then the model may be moved, cast, put in eval mode or given adapters. A copy or a pickle of the tower gets an
    `Installed` of its own, with nothing captured. This is not an `nn.Module`, and it holds the encoder in a plain
    attribute, so the tower's class, hooks, parameter names and state dict keys do not change. `before` is the callable
    that it replaces, `None` for the one of the tower's class.

    Attributes:
        falls_back: If True, as for a tower without a recipe for its class, the tower runs its own forward if it cannot
            be graphed after all, or in calls that its encoder refuses.
    """

    def __init__(
        self, tower: Understood, budgets: Budgets | None, options: dict[str, Any], shared: Shared,
        before: Callable[..., Any] | None,
    ) -> None:  # fmt: skip
        self.tower = tower
        self.module = tower.module
        self.shared = shared
        self.falls_back = not tower.declared
        self._budgets = budgets
        self._options = options
        self._before = before
        self._encoder: GraphedEncoder | None = None
        self._lock = threading.Lock()
        self._told: set[type] = set()
        self._gave_up = False
        self.__signature__ = inspect.signature(self._original)

    @property
    def _original(self) -> Callable[..., Any]:
        bound: Callable[..., Any] = self._before or getattr(type(self.module), self.tower.name).__get__(self.module)
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
            pool = self.shared.setdefault(next(self.tower.parts.parameters()).device, Pool())
            options = {"pool": pool, **self.tower.options, **self._options}
            encoder: GraphedEncoder = self.tower.recipe(self.module, self._budgets, **options)
            return encoder

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode."""
        if self.tower.method is not None:
            return self.tower.method.answer(self.module, self.encoder, self._original, *args, **kwargs)
        if not self.falls_back:
            return self.encoder(*args, **kwargs)
        if self._gave_up or (self._encoder is None and (self._told or self._is_training())):
            self._count(NOT_CAPTURED)
            return self._original(*args, **kwargs)
        try:
            return self.encoder(*args, **kwargs)
        except (CaptureError, CompilerError, torch.OutOfMemoryError) as error:
            # Every call would try again. Inside of another capture it was not tried: graphs do not nest.
            self._gave_up = not inside_capture() and not (self._encoder and len(self._encoder.executor.store))
            self._tell(error, "a call" if not self._gave_up else "every call")
            self._count(NOT_CAPTURED)
        except (InputError, LayoutError, SpecError) as error:
            self._tell(error, "a call")
            self._count(NOT_UNDERSTOOD)
        return self._original(*args, **kwargs)

    def _tell(self, error: Exception, which: str) -> None:
        """Warn of calls that run eager because of an error, once for each kind of error."""
        name, kind = type(self.module).__name__, type(error)
        if kind not in self._told:
            self._told.add(kind)
            found = "" if self.tower.declared else ", which vg.wrap found without a recipe for it,"
            warn(f"{which} of {name}{found} runs eager: {error}")

    def _is_training(self) -> bool:
        return any(part.training for part in self.module.modules())

    def _count(self, reason: str) -> None:
        if self._encoder is not None:
            self._encoder.stats.count_eager(reason)

    def remove(self) -> None:
        """Restore what was replaced, and free the graphs."""
        own = vars(self.module)
        place = next(name for name, value in own.items() if value is self)
        if self._before is None and place == self.tower.name:
            del own[place]
        else:
            own[place] = self._original
        if self._encoder is not None:
            self._encoder.release()

    @contextmanager
    def _without_encoder(self) -> Iterator[None]:
        """Restore what was replaced inside the block: an encoder made there keeps it for eager calls."""
        own, name = vars(self.module), self.tower.name
        now = own[name]
        own[name] = self._original
        try:
            yield
        finally:
            own[name] = now

    def __deepcopy__(self, memo: dict[int, Any]) -> "Installed":
        module, before = copy.deepcopy((self.module, self._before), memo)
        return Installed(self.tower._replace(module=module), self._budgets, self._options, self.shared, before)

    def __reduce__(self) -> Any:
        options = {name: value for name, value in self._options.items() if name != "pool"}
        return Installed, (self.tower, self._budgets, options, self.shared, self._before)


def install(tower: Understood, budgets: Budgets | None, options: dict[str, Any], shared: Shared) -> Installed:
    """Install an encoder; in place of a forward that accelerate has replaced, inside of accelerate's."""
    own = vars(tower.module)
    place = PLACES["_hf_hook" in own] if tower.method is None else tower.name
    own[place] = encoder = Installed(tower, budgets, options, shared, own.get(place))
    return encoder


def installed(module: nn.Module) -> Installed | None:
    """Return what is installed on a module, `None` if nothing is."""
    return next((value for value in vars(module).values() if isinstance(value, Installed)), None)
