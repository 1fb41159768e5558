"""Start from the measurements of an earlier run."""

from typing import Any

from varlen_graphs.attention import timing
from varlen_graphs.budgets.budget import Budget
from varlen_graphs.calls.execute import Executor
from varlen_graphs.calls.lazy_capture import Requests
from varlen_graphs.calls.warmup_file import WarmupSection, identity_of, read_section
from varlen_graphs.declaration.static_args import json_static_args
from varlen_graphs.errors import CaptureError, InputError, SpecError, warn
from varlen_graphs.options.capture import Capture
from varlen_graphs.routing.recent import share_of_each


class WarmStart:
    """Loads and saves the measurements of an encoder.

    Args:
        executor: The executor of the encoder.
        options: Options that measurements depend on.
        capture: The warm-up file, and the section of the encoder there.
    """

    def __init__(self, executor: Executor, options: tuple[object, ...], capture: Capture) -> None:
        self._executor = executor
        self._options = options
        self._capture = capture
        self._used: list[tuple[dict[str, Any], dict[Budget, float]]] = []

    def load(self) -> None:
        """Take in the file of an earlier run, if there is one and it has something of this encoder.

        Raises:
            InputError: It has not, with `on_bad_warmup="error"`.
        """
        if self._capture.warmup is None:
            return
        try:
            known = read_section(self._capture.warmup, self._name, self._identity())
        except InputError as error:
            if self._capture.on_bad_warmup == "error":
                raise
            warn(f"{error}. It is ignored, and everything is measured again")
            return
        if known is None:
            return
        budgets, device = self._executor.store.budgets, self._executor.forward.device
        if known.costs is not None and (timed := known.costs.replays.keys() & {*budgets.budgets}):
            budgets.known = frozenset(timed)
            budgets.learn(known.costs)
        if device is not None:
            timing.learn(known.attention, device)
        each = share_of_each(sum(sum(calls.values()) for _, calls in known.used))
        self._used = [
            (static_args, {budget: n * each for budget, n in calls.items()}) for static_args, calls in known.used
        ]

    def section(self) -> WarmupSection:
        """Return the measurements of this run."""
        device, costs = self._executor.forward.device, self._executor.store.budgets.measured
        costs = costs if costs is not None and costs.measured else None
        timed = timing.as_json(device) if device is not None else []
        by_key = [(json_static_args(key), dict(replays)) for key, replays in [*self._executor.used.items()]]
        used = [(static_args, replays) for static_args, replays in by_key if static_args is not None]
        return WarmupSection(self._name, self._identity(), costs, used, timed)

    def request_used(self, requests: Requests) -> None:
        """Request the budgets that calls used in the earlier run, once."""
        used, self._used = self._used, []
        for static_args, calls in used:
            try:
                inputs = self._executor.capture_inputs(static_args)
            except InputError:  # the module does not take these any more
                continue
            except (SpecError, CaptureError):  # the shape of rows is not known, or graphs are off: try again later
                self._used.append((static_args, calls))
                continue
            if inputs is not None:
                requests.add(inputs, calls, from_file=True)

    @property
    def _name(self) -> str:
        return self._capture.section or type(self._executor.forward.module).__name__

    def _identity(self) -> dict[str, str]:
        forward = self._executor.forward
        return identity_of(forward.module, forward.spec, forward.device, *self._options)
