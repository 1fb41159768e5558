"""Probes run a tower on small calls before there is an encoder, and try declarations of it, compared as graphs are."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES, hidden_states_by_config
from varlen_graphs.declaration.reading import read_layout
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError, VarlenGraphsError
from varlen_graphs.outputs.parts import flatten
from varlen_graphs.recipes.rounding import rounding
from varlen_graphs.recipes.towers import device_of
from varlen_graphs.torch_dispatch.checked_indices import run_checked
from varlen_graphs.torch_dispatch.rules_mode import CaptureRulesMode
from varlen_graphs.verify.compare import Example, few, limit_of

RUN_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
"""Errors that a tower raises for inputs it does not accept."""


class UnknownCallError(SpecError):
    """Neither the configuration of a tower nor its arguments tell how it is called. Its first call does."""


class TowerProbe:
    """A tower to run. Subclasses know its calls, and declare what it returns for them.

    Args:
        tower: The tower: a shadow, which runs may change.

    Attributes:
        tower: As given.
        forward: Its own forward.
        takes: The arguments of that, by name.
        device: Its device.
        tolerance: That of the encoder to come; `None` for the default.
    """

    tolerance: float | None = None

    def __init__(self, tower: nn.Module) -> None:
        self.tower, self.forward = tower, tower.forward
        self.takes = inspect.signature(tower.forward).parameters
        self.device = device_of(tower)

    def accepts(self, name: str) -> bool:
        """Return True if the tower takes an argument of this name."""
        return name in self.takes or any(one.kind is one.VAR_KEYWORD for one in self.takes.values())

    @property
    def plain(self) -> dict[str, bool]:
        """The argument by which a call gets no hidden states, if the configuration asks for them; else empty."""
        asks = bool(hidden_states_by_config(self.tower)) and self.accepts(OUTPUT_HIDDEN_STATES)
        return {OUTPUT_HIDDEN_STATES: False} if asks else {}

    def run(self, call: Mapping[str, Any]) -> Any:
        """Return the tower's own output of a call, without gradients. An index out of range is an error on a GPU, too.

        Raises:
            Exception: That of the tower, one of `RUN_ERRORS` for a call that it does not take.
        """
        with torch.no_grad():
            return run_checked(partial(self.forward, **call), self.device)

    def trial(self, spec: BufferSpec, forward: Callable[..., Any] | None, budget: Budget | int) -> "Trial":
        """Return a trial of a declaration and its forward."""
        return Trial(self.tower, spec, forward, budget, self.tolerance)


def tolerance_of(options: Mapping[str, Any]) -> float | None:
    """Return the tolerance among the options of an encoder."""
    return getattr(options.get("verify"), "tolerance", None)


def itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a tower that calls it, with the arguments of its forward."""

    def function(tower: nn.Module, /, **arguments: Any) -> Any:
        return tower(**arguments)

    own = inspect.signature(forward).parameters
    tower = inspect.Parameter("tower" if "tower" not in own else "_tower", inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = inspect.Signature([tower, *own.values()])  # type: ignore[attr-defined]
    return function


class Trial:
    """Runs a declared forward eager, watched for what no graph can hold, and compares it with the tower itself.

    Args:
        tower: The tower: a shadow, which runs may change.
        spec: The declaration.
        forward: Its forward; `None` for the tower's own, without the hooks on the tower, which no graph holds.
        budget: A budget of its kind.
        tolerance: Largest error allowed; by default that of graphs, see `vg.options.Verify`.
    """

    def __init__(
        self, tower: nn.Module, spec: BufferSpec, forward: Callable[..., Any] | None, budget: Budget | int,
        tolerance: float | None = None,
    ) -> None:  # fmt: skip
        def watched(tower: nn.Module, /, **arguments: Any) -> Any:
            run = partial(tower.forward, **arguments) if forward is None else partial(forward, tower, **arguments)
            return CaptureRulesMode(self._device, "it").watch(run)

        watched.__signature__ = inspect.signature(forward or itself(tower.forward))  # type: ignore[attr-defined]
        self._executor = GraphedEncoder(tower, [budget], spec, forward=watched, backend="eager").executor
        self._device, self._tolerance = device_of(tower), tolerance

    def check(self, call: Mapping[str, Any], own: Any, answered: Mapping[str, Any] | None = None) -> None:
        """Check that the forward gives for each item of a call what the tower itself gave.

        Args:
            call: The arguments of the call, by name.
            own: The output of the tower itself.
            answered: The arguments that the tower answered, if their padding is another: the same items.

        Raises:
            SpecError: It gives something else, or not as declared.
            CaptureError: It does what no graph can hold.
            Exception: That of the tower.
        """
        executor, forward = self._executor, self._executor.forward
        tried, bound = executor.bind((), call), executor.bind((), call if answered is None else answered)
        layout = read_layout(executor.spec, bound)
        example = Example(bound, own, any_integers=True)
        result = run_checked(partial(forward.exact, tried), self._device)
        if type(result) is not type(own):
            raise SpecError(f"it returns a {type(result).__name__}, and the tower a {type(own).__name__}")
        output = flatten(result, executor.spec.declared)
        found, limit = example.furthest(output, tried), limit_of(self._tolerance, forward, self._device)
        most = max(limit, rounding(forward.module_dtype, self._device))  # what noise in the rows may explain, too
        if found.error > min(most, example.allowed(found, limit, forward, output)):
            raise SpecError(
                f"{found.where} differs from the tower's own (relative L2 {found.error:.1e}), in a call of items "
                f"{few(layout)}"
            )


def why_not(check: Callable[[], object]) -> str | None:
    """Return the error that a check raises, as one line; `None` if it raises none."""
    try:
        check()
    except (VarlenGraphsError, *RUN_ERRORS) as error:
        return " ".join(str(error).splitlines()[:2]) or repr(error)
    return None
