"""Observation of one run of a module: violations are recorded, and the run goes on."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from varlen_graphs.capture.mode import OBSERVED
from varlen_graphs.doctor.allocations import UNKNOWN, Allocations, Owner, Owners
from varlen_graphs.doctor.arguments import describe_arguments, index_numbers
from varlen_graphs.doctor.encoders import EncoderCall, running_encoder
from varlen_graphs.doctor.module_tracker import ModuleTracker
from varlen_graphs.doctor.run_record import CallSite, Occurrence, OperatorCall, RunRecord
from varlen_graphs.doctor.scalars import scalars_of
from varlen_graphs.doctor.sources import Result, Sources, storage_key
from varlen_graphs.torch_dispatch.lines import UNKNOWN_LINE, Line, raising_line, user_lines
from varlen_graphs.torch_dispatch.rules import (
    Violation,
    creates_on_host,
    draws_random_numbers,
    has_storage,
    named_arguments,
    written_arguments,
)
from varlen_graphs.torch_dispatch.rules_mode import CaptureRulesMode

aten = torch.ops.aten

_ITERATIONS = (Tensor.unbind, torch.unbind)  # `for part in tensor` calls the first
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_INDEXED = ("aten.slice.Tensor", "aten.select.int")
_SIZES = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.__len__)  # type: ignore[attr-defined]


@dataclass
class _FunctionCall:
    """The torch function being called; each of its calls counts once, whatever operators it runs."""

    name: str
    tensors: list[Tensor]
    indexes: bool = False
    counted: bool = False


def observe(
    run: Callable[[], Any],
    tracker: ModuleTracker,
    device: torch.device,
    owners: Owners,
    sources: Sources,
    on_host: dict[int, Tensor],
    shared: Set[int],
) -> RunRecord:
    """Run a function eagerly, without gradients, and record what it does, including an error that it raises.

    `sources` has the tensors that exist before the run. `on_host` are the host tensors created by earlier runs; those
    of this run are added. `shared` are the keys of storages that others read: what would write to them writes to a
    copy.
    """
    observer = _Observer(tracker, device, owners, sources, on_host, shared)
    token = OBSERVED.set(True)
    try:
        with torch.inference_mode(False):
            observer.record_outputs(observer.watch(run))
    except Exception as error:
        what = shorten(f"it raised {type(error).__name__}: {error}", 300)
        trace = error.__traceback__
        observer.run.error = Occurrence("error", what, raising_line(trace), tracker.path_of(trace))
        return observer.run
    finally:
        OBSERVED.reset(token)
    if observer.allocations.alive():
        gc.collect()  # memory that only reference cycles hold does not count as kept
    observer.run.kept = observer.allocations.alive()
    observer.run.places = observer.allocations.places()
    return observer.run


class _Observer(CaptureRulesMode):
    """Records violations instead of raising at the first one."""

    takes_constants = False

    # On the CPU, a copy between host and device returns the tensor itself, where a GPU would have two tensors. Here it
    # is copied, so that host and device tensors stay distinct as on a GPU.
    def __init__(
        self,
        tracker: ModuleTracker,
        device: torch.device,
        owners: Owners,
        sources: Sources,
        on_host: dict[int, Tensor],
        shared: Set[int],
    ) -> None:
        super().__init__(device, "the module")
        self.made_on_host = on_host
        self.run = RunRecord()
        self.allocations = Allocations(owners)
        self._tracker = tracker
        self._owners = owners
        self._shared = shared
        self._copies: list[Tensor] = []  # held, so that their keys stay unique
        self._function: _FunctionCall | None = None
        self._sizes_read: Counter[Line] = Counter()
        self._suppressed = 0  # inside an operation that is recorded already, or on the host
        self._sources = sources
        self._encoder_calls: set[EncoderCall] = set()

    def mark_host(self, tensor: Tensor) -> None:
        """Mark a tensor as one of the host, whose memory is no business of a graph."""
        super().mark_host(tensor)
        if has_storage(tensor):
            self.allocations.add_on_host(tensor, next(user_lines(), UNKNOWN_LINE), self._tracker.path)

    def on_violation(self, violation: Violation) -> None:
        """Record a violation."""
        if not self._is_silent():
            self._record(violation.kind, violation.what)

    def on_function_violation(
        self, violation: Violation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a violation, and call the function nevertheless."""
        silent = self._is_silent()
        if not silent:
            self._record(violation.kind, violation.what)
        emulated = self.device.type == "cpu"
        with self._suppress():
            if emulated and violation.kind == "copy to host":
                args = (args[0].clone(), *args[1:])
            result = func(*args, **kwargs)
            if emulated and violation.kind == "copy to host":
                tree_map_only(Tensor, self.mark_host, result)
            if emulated and violation.kind == "copy to device":
                result = tree_map_only(Tensor, self._to_device, result)
        if silent:
            self.allocations.add_unexamined(tree_leaves(result))
        self._record_read(result)
        return result

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Call a function, whose operators may use the sizes of its tensors; skip the creation of host tensors."""
        if not tensors and creates_on_host(func, tensors, kwargs, self.names_host):
            with self._suppress():
                return super().call_function(func, args, kwargs, tensors)
        self._function = _FunctionCall(str(getattr(func, "__name__", func)), tensors, func in _INDEXING)
        if self._function.indexes and not self.is_host(tensors[0]) and not self._is_silent():
            # A slice of everything runs no operator, so the numbers of the operators do not tell all.
            self._record_operation(f"Tensor.{self._function.name}", index_numbers(args[1]))
        try:
            result = super().call_function(func, args, kwargs, tensors)
        finally:
            self._function = None
        if func in _SIZES and not self.is_in_list(tensors[0]) and not self._is_silent():
            self._record_sizes(result)
        if func in _ITERATIONS and args[1:] in ((), (0,)) and not kwargs:
            line = next(user_lines(), UNKNOWN_LINE)
            self.run.turns[line] = self.run.turns.get(line, 0) + len(tensors[0])
        return result

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        if self._shared and isinstance(func, torch._ops.OpOverload):
            copies = {id(one): self._copy(one) for one in written_arguments(func, args, kwargs) if self._is_shared(one)}
            if copies:
                args, kwargs = tree_map_only(Tensor, lambda one: copies.get(id(one), one), (args, kwargs))
        return super().run_operator(func, args, kwargs)

    def on_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Record an operator, its writes and its allocations."""
        if self.on_fast_path:
            return  # recorded in the run before
        if func is aten._local_scalar_dense.default:
            self._record_read(results)
        if self._is_silent():
            self.allocations.add_unexamined(results)
            return
        named: dict[str, Any] = {str(at): value for at, value in enumerate(args)} | kwargs
        if isinstance(func, torch._ops.OpOverload):
            named = named_arguments(func, args, kwargs)
            if draws_random_numbers(func, args, kwargs) and kwargs.get("generator") is None:
                self._record("random numbers", f"{func} draws random numbers")
            for tensor in written_arguments(func, args, kwargs):
                self._record_write(func, tensor)
        site, function, turn = self._record_operation(str(func), named, scalars_of(func, results))
        known = {storage_key(tensor) for tensor in inputs}
        for at, result in enumerate(results):
            if isinstance(result, Tensor):
                fresh = storage_key(result) not in known
                self.allocations.follow_data(func, inputs, result)
                call = len(self.run.operations[site]) - 1
                self._sources.add(result, Result(site, call, at, function, turn))
                if fresh:
                    self.allocations.add(result, site.lines[0], self._tracker.path)

    def record_outputs(self, output: Any) -> None:
        """Record where the tensors that the run returned come from."""
        for path, leaf in tree_flatten_with_path(output)[0]:
            if isinstance(leaf, Tensor) and has_storage(leaf) and not self.is_host(leaf):
                self.run.outputs[keystr(path)] = self._sources.of(leaf)

    def _is_silent(self) -> bool:
        """Return True in an operation that is recorded already, on the host, or in an encoder; record its call."""
        if self._suppressed:
            return True
        call = running_encoder()
        if call is not None and call not in self._encoder_calls:
            self._encoder_calls.add(call)
            what = f"it calls the GraphedEncoder of {call.name}, whose inside was not examined"
            self.run.occurrences.append(Occurrence("graphed encoder", what, call.line, self._tracker.path))
        return call is not None

    def _record(self, kind: str, what: str) -> None:
        line = next(user_lines(), UNKNOWN_LINE)
        self.run.occurrences.append(Occurrence(kind, what, line, self._tracker.path))

    def _record_operation(
        self, operator: str, named: dict[str, Any], scalars: frozenset[str] = frozenset()
    ) -> tuple[CallSite, CallSite, int]:
        """Return the place of the operator, that of the torch function around it, and the number of this call of it."""
        lines = tuple(user_lines()) or (UNKNOWN_LINE,)
        site = CallSite(lines, operator)
        function = self._function or _FunctionCall(operator, [])
        place = CallSite(lines, function.name)
        if not function.counted:
            function.counted = True
            self.run.functions.setdefault(place, []).append(self._tracker.path)
        turn = len(self.run.functions.get(place, ())) - 1
        arguments = describe_arguments(named, function.tensors, self)
        if function.indexes and operator in _INDEXED:
            arguments.values.clear()  # those of the index are recorded
        operation = OperatorCall(*arguments, len(self.run.sizes), self._tracker.path, scalars, turn)
        self.run.operations.setdefault(site, []).append(operation)
        return site, place, turn

    def _record_read(self, result: Any) -> None:
        numbers = {leaf for leaf in tree_leaves(result) if isinstance(leaf, bool | int | float)}
        if numbers:
            self.run.reads.setdefault(next(user_lines(), UNKNOWN_LINE), set()).update(numbers)

    def _record_sizes(self, sizes: Any) -> None:
        line = next(user_lines(), UNKNOWN_LINE)
        self._sizes_read[line] += 1
        for dim, size in enumerate(sizes if isinstance(sizes, tuple) else (sizes,)):
            self.run.sizes.append((f"{line.file}:{line.number}, {self._sizes_read[line]}, {dim}", size))

    def _record_write(self, func: Any, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if tensor not in self.allocations and not self.is_host(tensor):
            unknown = Owner("state written", f"a tensor {list(tensor.shape)} made before the run")
            owner = self._owners.get(key, unknown)
            self._record(owner.kind, f"{func} writes into {owner.name}")

    def is_in_list(self, tensor: Tensor) -> bool:
        """Return True if a list among the call's arguments holds a tensor, or it is a view of such a one."""
        return has_storage(tensor) and self._owners.get(storage_key(tensor), UNKNOWN).in_list

    def sources_of(self, tensor: Tensor) -> Set[Any]:
        """Return the possible sources of a tensor, by name if it existed before the run."""
        key = storage_key(tensor)
        owner = self._owners.get(key, UNKNOWN)
        if owner.kind == "state written" and tensor not in self.allocations:
            self.run.used.add(owner.name)
        return self._sources.of(tensor)

    def _is_shared(self, tensor: Tensor) -> bool:
        return has_storage(tensor) and storage_key(tensor) in self._shared

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy that findings name like the tensor."""
        copied = tensor.clone()
        self._copies.append(copied)
        if (owner := self._owners.get(storage_key(tensor))) is not None:
            self._owners[storage_key(copied)] = owner
        return copied

    def _to_device(self, tensor: Tensor) -> Tensor:
        moved = tensor.clone()
        self.made_on_host.pop(storage_key(moved), None)
        self.allocations.add(moved, next(user_lines(), UNKNOWN_LINE), self._tracker.path)
        return moved

    @contextmanager
    def _suppress(self) -> Iterator[None]:
        self._suppressed += 1
        try:
            yield
        finally:
            self._suppressed -= 1
