"""An encoder installed in place of a tower's forward."""

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import checkpoint

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.calls.execute import OWN_OUTPUT
from varlen_graphs.capture.ambient import TRAINING_CHANGED
from varlen_graphs.capture.mode import HOOKS
from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.capture.parts import is_hooked, part_in_training
from varlen_graphs.capture.pool import Pool, inside_capture
from varlen_graphs.capture.torch_modes import active_mode, watcher
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import (
    CaptureError,
    CompilerError,
    InputError,
    LayoutError,
    SpecError,
    VarlenGraphsError,
    warn,
)
from varlen_graphs.graphs.graph_capture import reason_of
from varlen_graphs.recipes.automatic.by_call import CallEncoder, by_call
from varlen_graphs.recipes.automatic.call_probes import CallReader
from varlen_graphs.recipes.registry import METHODS, Method, Recipe
from varlen_graphs.recipes.tower_encoder import SeveralEncoders
from varlen_graphs.stats import Reason, Stats
from varlen_graphs.torch_dispatch.lines import raising_package
from varlen_graphs.torch_dispatch.thread_modes import run_aside

PLACES = ("forward", "_old_forward")
"""Instance attributes that hold a forward: accelerate replaces the first, and keeps what it replaced in the second."""


NOT_UNDERSTOOD = "arguments that vg.wrap did not understand"
"""Reason of eager runs of calls that the encoder of a tower without a recipe refuses."""

NOT_CAPTURED = "its capture failed"
"""Reason of eager runs of a tower without a recipe after its first capture failed."""

FAILED = "an error in varlen_graphs"
"""Reason of eager runs of calls that the module itself answers."""

TRIES = 4
"""Number of calls that an encoder may be learned from before the tower stays eager: it may refuse the first itself."""

PUT_INTO_ANOTHER = "its forward was put into another function after vg.wrap"
"""Reason of eager runs of a tower whose forward is that function: the encoder would take it for the tower's own."""

BEING_MADE = "its encoder was being made"
"""Reason of eager runs in other threads meanwhile."""


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
    def by_call(self) -> bool:
        """True if it is understood by its first call."""
        return self.recipe is by_call

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

    Until then the model may be moved, cast, put in eval mode or given adapters. Graphs are those of evaluation mode: as
    long as a part is in training mode, calls run eager, and a tower without a recipe gets no encoder. A copy or a
    pickle of the tower gets an `Installed` of its own, with nothing captured. This is not an `nn.Module`, and it holds
    the encoder in a plain attribute, so the tower's class, hooks, parameter names and state dict keys do not change.
    `before` is the callable that it replaces, `None` for the one of the tower's class.

    Attributes:
        falls_back: If True, as for a tower without a recipe for its class, the tower runs its own forward if it cannot
            be graphed after all, or in calls that its encoder refuses.
        stats: Counters of the encoder, and before there is one those of calls without it.
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
        self._before_it = Stats()
        self._told: set[object] = set()
        self._gave_up: str | None = None  # the reason of all later eager runs
        self._refusal: Exception | None = None  # the last one before there was an encoder
        self._refusals = 0
        self._places = [*dict.fromkeys((tower.name, *PLACES))]
        self._asides: dict[tuple[int, int], bool] = {}  # those by which this stood aside, True while it does
        self._removed = False
        self.__signature__ = inspect.signature(self._original)

    @property
    def _original(self) -> Callable[..., Any]:
        bound: Callable[..., Any] = self._before or getattr(type(self.module), self.tower.name).__get__(self.module)
        return bound

    @property
    def encoder(self) -> GraphedEncoder:
        """Encoder of the tower, made at the first access.

        Raises:
            SpecError: None can be made, or not now.
        """
        if self._encoder is None:
            with self._lock:
                if self._encoder is None:
                    if (reason := self.why_none()) is not None:
                        raise SpecError(reason)
                    self._keep(self._make({}))
        assert self._encoder is not None  # noqa: S101 - kept
        return self._encoder

    def _keep(self, made: GraphedEncoder) -> None:
        made.stats.add_eager(self._before_it)
        self._encoder = made

    def _learn(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make the encoder of a tower that is understood by its first call, which is this one.

        Raises:
            SpecError: None can be made.
        """
        with self._lock:
            if self._encoder is not None:
                return
            # Of the tower and its parts, the first that is called gets an encoder.
            inner = [one for one in map(installed, self.module.modules()) if one is not None and one is not self]
            if graphed := [type(one.module).__name__ for one in inner if one._encoder is not None]:
                raise SpecError(f"{type(self.module).__name__} runs as it is, because {graphed[0]} in it has graphs")
            form = CallReader(self.module, self._original).read(args, kwargs)
            places = [(one.remove(), one) for one in inner]
            try:
                self._keep(self._make({"call": {**form.tensors, **form.fixed}}))
            except BaseException:
                for place, one in places:
                    one.put(place)
                raise

    @property
    def stats(self) -> Stats:
        """Counters of the encoder, and before there is one those of calls without it."""
        return self._before_it if self._encoder is None else self._encoder.stats

    def why_none(self) -> str | None:
        """Return why no encoder can be made now, and what to do; `None` if one can, or there is one."""
        if self._encoder is not None:
            return None
        name = type(self.module).__name__
        if self._gave_up is not None:
            return f"{self._refusal}; to try again, vg.unwrap(model) and wrap it"
        if not self.falls_back:
            return None  # its recipe runs nothing
        if (reason := self._why_training()) is not None:
            return reason
        if (mode := active_mode()) is not None:
            return f"the encoder of {name} is made by the first call outside of {mode}"
        if not self.tower.by_call:
            return None
        last = "" if self._refusal is None else f"; the last one was refused: {self._refusal}"
        return f"{name} is understood by its first call{last}"

    def _why_training(self) -> str | None:
        if (part := part_in_training(self.tower.parts)) is None:
            return None
        name = type(self.module).__name__
        where = f"{part} inside of {name}" if part else name
        return f"{where} is in training mode, so that calls run eager; call model.eval() first"

    def _make(self, more: Mapping[str, Any]) -> GraphedEncoder:
        with self._without_encoder():
            pool = self.shared.setdefault(next(self.tower.parts.parameters()).device, Pool())
            options = {"pool": pool, **self.tower.options, **self._options, **more}
            # The caller's random numbers and hooks on saved tensors see nothing of it.
            encoder: GraphedEncoder = run_aside(
                functools.partial(self.tower.recipe, self.module, self._budgets, **options)
            )
            others = encoder.others if isinstance(encoder, SeveralEncoders) else ()
            for one in (encoder, *others):
                one.executor.mode.expect_evaluation()
            if isinstance(encoder, CallEncoder):
                encoder.as_it_was = self._without_encoder
            return encoder

    @property
    def is_of_class(self) -> bool:
        """True if this is in place of the forward of the class, and of no other."""
        return self._before is None

    @property
    def __code__(self) -> CodeType:  # torch.export looks for the names of arguments there
        code: CodeType = self._original.__code__
        return code

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode."""
        if self._removed:  # somebody kept it
            return self._original(*args, **kwargs)
        if (by := watcher(args, kwargs)) is not None and not inside_capture():
            return self._eager(by, args, kwargs)
        if self._gave_up is not None:
            return self._eager(self._gave_up, args, kwargs)
        if not self._is_in_place():
            if PUT_INTO_ANOTHER not in self._told:
                self._told.add(PUT_INTO_ANOTHER)
                warn(f"calls of {type(self.module).__name__} run eager: {PUT_INTO_ANOTHER}; do that before vg.wrap")
            return self._eager(PUT_INTO_ANOTHER, args, kwargs)
        if self._encoder is None and (reason := self._why_training()) is not None:
            self._tell_of_training(reason)
            if self.falls_back:
                return self._eager(TRAINING_CHANGED, args, kwargs)
        if self._encoder is None and self.tower.by_call and is_hooked(self.module):  # hooks would see what is tried
            return self._eager(HOOKS, args, kwargs)
        if self.tower.method is not None:
            return self.tower.method.answer(self.module, self.encoder, self._original, *args, **kwargs)
        if not self.falls_back:
            return self.encoder(*args, **kwargs)
        try:
            if self._encoder is None and self.tower.by_call:
                self._learn(args, kwargs)
            return self.encoder(*args, **kwargs)
        except (CaptureError, CompilerError, torch.OutOfMemoryError) as error:
            # Every call would try again. Inside of another capture it was not tried: graphs do not nest.
            if not inside_capture() and not (self._encoder and len(self._encoder.executor.store)):
                self._gave_up, self._refusal = NOT_CAPTURED, error
            self._tell(error)
            if hasattr(error, OWN_OUTPUT):
                self._count(NOT_CAPTURED, 1)
                return getattr(error, OWN_OUTPUT)
            return self._eager(NOT_CAPTURED, args, kwargs)
        except (InputError, LayoutError, SpecError) as error:
            if self._encoder is None and not inside_capture():
                self._refusals += 1
                self._refusal = error
                if self._refusals >= (TRIES if self.tower.by_call else 1):
                    self._gave_up = NOT_UNDERSTOOD
            self._tell(error)
            return self._eager(Reason(NOT_UNDERSTOOD, reason_of(error)), args, kwargs)
        except VarlenGraphsError:
            raise
        except Exception as error:
            if not _is_raised_here(error):
                raise
            output = self._original(*args, **kwargs)
            self._count(Reason(FAILED, reason_of(error)), 1)
            self._tell(error)
            return output

    def _tell(self, error: Exception) -> None:
        """Warn of calls that run eager because of an error, once for each kind of error."""
        name, kind = type(self.module).__name__, type(error)
        if kind not in self._told:
            self._told.add(kind)
            found = "" if self.tower.declared else ", which vg.wrap found without a recipe for it,"
            which = "a call" if self._gave_up is None else "every call"
            instead = "\nTo declare it yourself, see docs/recipes.md" if isinstance(error, CaptureError) else ""
            what = error if isinstance(error, VarlenGraphsError | torch.OutOfMemoryError) else repr(error)
            warn(f"{which} of {name}{found} runs eager: {what}{instead}")

    def _tell_of_training(self, reason: str) -> None:
        """Warn once of a part that was left in training mode. Where the tower is trained, nobody expects graphs."""
        if not (self.module.training and torch.is_grad_enabled()) and TRAINING_CHANGED not in self._told:
            self._told.add(TRAINING_CHANGED)
            warn(reason)

    def _eager(self, reason: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the original, and count the call, unless the encoder itself makes it."""
        if self._encoder is None or not self._encoder.executor.forward.is_running:
            self._count(reason, 1)
        return self._original(*args, **kwargs)

    def _count(self, reason: str, calls: int) -> None:
        for _ in range(calls):
            self.stats.count_call(1)
            self.stats.count_eager(reason)

    def _is_in_place(self) -> bool:
        """Return True if the module holds this as its forward, or accelerate as what it has replaced."""
        own = vars(self.module)
        return any(_installed_at(own.get(place)) is self for place in self._places)

    def put(self, place: str) -> None:
        """Put this into an attribute of the module, in place of a forward."""
        self._removed = False
        vars(self.module)[place] = self

    def remove(self) -> str:
        """Restore what was replaced, and free the graphs; return the name of the attribute where this was."""
        own = vars(self.module)
        with self._lock:  # another thread may be making the encoder
            place = next(name for name, value in [*own.items()] if _installed_at(value) is self)
            if self._before is None and place == self.tower.name:
                del own[place]
            else:
                own[place] = self._original
            self._removed = True
        if self._encoder is not None:
            self._encoder.release()
        return place

    @contextmanager
    def _without_encoder(self) -> Iterator[None]:
        """Restore what was replaced inside the block: an encoder made there keeps it for eager calls.

        Other threads run it meanwhile, and are counted; for them this is still installed.
        """
        own, name = vars(self.module), self.tower.name
        key = id(self), len(self._asides)  # a copy of this has none of these
        self._asides[key] = True
        aside, now = _aside(self._original, self, key, self.is_of_class), own.get(name)
        if now is not None:  # else nothing is installed any more
            own[name] = aside
        try:
            yield
        finally:
            if own.get(name) is aside:  # else it was removed meanwhile
                own[name] = now
            self._asides[key] = False

    def stood_aside(self, key: tuple[int, int]) -> bool:
        """Return True if this stood aside by this key; False in a copy, made meanwhile, of the module."""
        return key in self._asides

    def settle(self) -> None:
        """Put this, in a copy of the module, where what stood aside for the original is."""
        own = vars(self.module)
        for name in [name for name, value in own.items() if isinstance(value, functools.partial)]:
            if own[name].func is _answer_aside and own[name].args[1] is self:
                own[name] = self

    def count_meanwhile(self, key: tuple[int, int]) -> None:
        """Count a call of another thread while the encoder is being made. Later ones are runs of the encoder's own."""
        if self._asides[key]:
            self._count(BEING_MADE, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Installed":
        module, before = copy.deepcopy((self.module, self._before), memo)
        return Installed(self.tower._replace(module=module), self._budgets, self._options, self.shared, before)

    def __reduce__(self) -> Any:
        options = {name: value for name, value in self._options.items() if name != "pool"}
        return Installed, (self.tower, self._budgets, options, self.shared, self._before)


def _aside(forward: Callable[..., Any], one: Installed, key: tuple[int, int], is_of_class: bool) -> Callable[..., Any]:
    """Return what stands in place of a forward while its encoder is being made; a copy of the module copies both."""
    made = functools.update_wrapper(functools.partial(_answer_aside, forward, one, key, threading.get_ident()), forward)
    vars(made)["is_of_class"] = is_of_class
    if (code := getattr(forward, "__code__", None)) is not None:  # forwards may look for the names of their arguments
        vars(made)["__code__"] = code
    return made


def _answer_aside(
    forward: Callable[..., Any], one: Installed, key: tuple[int, int], thread: int, /, *args: Any, **kwargs: Any
) -> Any:  # fmt: skip
    """Answer by a forward as it is, and count calls of other threads; of a copy of the module, by its encoder."""
    if not one.stood_aside(key):
        one.settle()
        return one(*args, **kwargs)
    if threading.get_ident() != thread:
        one.count_meanwhile(key)
    return forward(*args, **kwargs)


def install(tower: Understood, budgets: Budgets | None, options: dict[str, Any], shared: Shared) -> Installed:
    """Install an encoder; in place of a forward that accelerate has replaced, inside of accelerate's."""
    own = vars(tower.module)
    place = PLACES["_hf_hook" in own] if tower.method is None else tower.name
    encoder = Installed(tower, budgets, options, shared, own.get(place))
    encoder.put(place)
    return encoder


def installed(module: nn.Module) -> Installed | None:
    """Return what is installed on a module, `None` if nothing is."""
    return next(filter(None, map(_installed_at, [*vars(module).values()])), None)  # a list: they may change


def _is_raised_here(error: Exception) -> bool:
    """Return True for an error of this library's own code, or of what it calls in torch."""
    if type(error).__module__ == checkpoint.__name__:  # which ends a run where it has all it needs
        return False
    return raising_package(error.__traceback__) == __name__.partition(".")[0]


def _installed_at(value: Any) -> Installed | None:
    """Return what is installed where a module holds a value, be its encoder just being made."""
    if isinstance(value, functools.partial) and value.func is _answer_aside:
        value, key = value.args[1:3]
        if not value.stood_aside(key):
            value.settle()
    return value if isinstance(value, Installed) else None
