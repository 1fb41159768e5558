"""Observation of one run of a module: violations are recorded, and the run goes on."""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from varlen_graphs.doctor.example_call import Number
from varlen_graphs.doctor.module_tracker import ModuleTracker
from varlen_graphs.doctor.run_record import Allocation, CallSite, Occurrence, OperatorCall, RunRecord, Value
from varlen_graphs.doctor.scalars import scalars_of
from varlen_graphs.doctor.sources import Result, Sources, storage_key
from varlen_graphs.watch.lines import UNKNOWN_LINE, Line, raising_line, user_lines
from varlen_graphs.watch.rules import (
    Violation,
    creates_on_host,
    draws_random_numbers,
    has_storage,
    named_arguments,
    written_arguments,
)
from varlen_graphs.watch.rules_mode import CaptureRulesMode

aten = torch.ops.aten

Owners = dict[int, tuple[str, str]]
"""Tensors that exist before a run, by `storage_key`: the kind of finding if one is written, and its name."""

_ITERATIONS = (Tensor.unbind, torch.unbind)  # `for part in tensor` calls the first
_SIZES = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.__len__)  # type: ignore[attr-defined]


@dataclass
class _FunctionCall:
    """The torch function being called; each of its calls counts once, whatever operators it runs."""

    name: str
    tensors: list[Tensor]
    counted: bool = False


def observe(
    run: Callable[[], Any],
    tracker: ModuleTracker,
    device: torch.device,
    owners: Owners,
    sources: Sources,
    on_host: dict[int, Tensor],
) -> RunRecord:
    """Run a function eagerly, without gradients, and record what it does, including an error that it raises.

    `sources` has the tensors that exist before the run. `on_host` are the host tensors created by earlier runs; those
    of this run are added.
    """
    observer = _Observer(tracker, device, owners, sources, on_host)
    try:
        with torch.inference_mode(False):
            observer.record_outputs(observer.watch(run, observer.on_triton_launch))
    except Exception as error:
        what = shorten(f"it raised {type(error).__name__}: {error}", 300)
        trace = error.__traceback__
        observer.run.error = Occurrence("error", what, raising_line(trace), tracker.path_of(trace))
        return observer.run
    if observer.alive():
        gc.collect()  # memory that only reference cycles hold does not count as kept
    observer.run.kept = observer.alive()
    return observer.run


class _Observer(CaptureRulesMode):
    """Records violations instead of raising at the first one."""

    # On the CPU, a copy between host and device returns the tensor itself, where a GPU would have two tensors. Here it
    # is copied, so that host and device tensors stay distinct as on a GPU.
    def __init__(
        self,
        tracker: ModuleTracker,
        device: torch.device,
        owners: Owners,
        sources: Sources,
        on_host: dict[int, Tensor],
    ) -> None:
        super().__init__(device, "the module")
        self.made_on_host = on_host
        self.run = RunRecord()
        self._allocations: dict[int, Allocation] = {}
        self._tracker = tracker
        self._owners = owners
        self._function: _FunctionCall | None = None
        self._sizes_read: Counter[Line] = Counter()
        self._suppressed = 0  # inside an operation that is recorded already, or on the host
        self._sources = sources
        self._from_data: set[int] = set()  # storages with results computed from contents of the call's tensors

    def alive(self) -> list[Allocation]:
        """Return the allocations that are still alive."""
        return [made for made in self._allocations.values() if made.storage() is not None]

    def mark_host(self, tensor: Tensor) -> None:
        """Mark a tensor as one of the host, whose memory is no business of a graph."""
        super().mark_host(tensor)
        if has_storage(tensor):
            self._allocations.pop(storage_key(tensor), None)

    def on_violation(self, violation: Violation) -> None:
        """Record a violation."""
        if not self._suppressed:
            self._record(violation.kind, violation.what)

    def on_function_violation(
        self, violation: Violation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a violation, and call the function nevertheless."""
        self.on_violation(violation)
        emulated = self.device.type == "cpu"
        with self._suppress():
            if emulated and violation.kind == "copy to host":
                args = (args[0].clone(), *args[1:])
            result = func(*args, **kwargs)
            if emulated and violation.kind == "copy to host":
                tree_map_only(Tensor, self.mark_host, result)
            if emulated and violation.kind == "copy to device":
                result = tree_map_only(Tensor, self._to_device, result)
        self._record_read(result)
        return result

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Call a function, whose operators may use the sizes of its tensors; skip the creation of host tensors."""
        if not tensors and creates_on_host(func, tensors, kwargs, self.names_host):
            with self._suppress():
                return super().call_function(func, args, kwargs, tensors)
        self._function = _FunctionCall(str(getattr(func, "__name__", func)), tensors)
        try:
            result = super().call_function(func, args, kwargs, tensors)
        finally:
            self._function = None
        if func in _SIZES and not self._suppressed:
            self._record_sizes(result)
        if func in _ITERATIONS and args[1:] in ((), (0,)) and not kwargs:
            line = next(user_lines(), UNKNOWN_LINE)
            self.run.turns[line] = self.run.turns.get(line, 0) + len(tensors[0])
        return result

    def on_triton_launch(
        self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Record a Triton launch outside of any operator."""
        if self.dispatch_depth or self.thread_id != threading.get_ident():
            return nullcontext()
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        if callable(named.get("grid")):
            named["grid"] = tuple(named["grid"](named))
        self._record_operation(f"the kernel {kernel.__name__}", named)
        return self._suppress()  # Triton's interpreter copies tensors

    def on_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Record an operator, its writes and its allocations."""
        if self.on_fast_path:
            return  # recorded in the run before
        if func is aten._local_scalar_dense.default:
            self._record_read(results)
        if self._suppressed:
            return
        named: dict[str, Any] = {str(at): value for at, value in enumerate(args)} | kwargs
        if isinstance(func, torch._ops.OpOverload):
            named = named_arguments(func, args, kwargs)
            if draws_random_numbers(func, args, kwargs) and kwargs.get("generator") is None:
                self._record("random numbers", f"{func} draws random numbers")
            for tensor in written_arguments(func, args, kwargs):
                self._record_write(func, tensor)
        site = self._record_operation(str(func), named, scalars_of(func, results))
        known = {storage_key(tensor) for tensor in inputs}
        for at, result in enumerate(results):
            if isinstance(result, Tensor):
                fresh = storage_key(result) not in known
                self._follow_data(func, inputs, result)
                self._sources.add(result, Result(site, len(self.run.operations[site]) - 1, at))
                if fresh:
                    self._record_allocation(result, site.lines[0])

    def _follow_data(self, func: Any, inputs: list[Tensor], result: Tensor) -> None:
        """Note whether a result is computed from the contents of the call's tensors, and not from their shapes."""
        name = str(func)
        from_shape = "_like" in name or ".new_" in name
        keys = {storage_key(tensor) for tensor in inputs}
        given = any(self._owners.get(key, ("", ""))[0] == "input written" for key in keys)
        if not from_shape and (given or keys & self._from_data):
            self._from_data.add(storage_key(result))
        elif storage_key(result) not in keys:
            self._from_data.discard(storage_key(result))

    def record_outputs(self, output: Any) -> None:
        """Record where the tensors that the run returned come from."""
        for path, leaf in tree_flatten_with_path(output)[0]:
            if isinstance(leaf, Tensor) and has_storage(leaf) and not self.is_host(leaf):
                self.run.outputs[keystr(path)] = self._sources.of(leaf)

    def _record(self, kind: str, what: str) -> None:
        line = next(user_lines(), UNKNOWN_LINE)
        self.run.occurrences.append(Occurrence(kind, what, line, self._tracker.path))

    def _record_operation(
        self, operator: str, named: dict[str, Any], scalars: frozenset[str] = frozenset()
    ) -> CallSite:
        lines = tuple(user_lines()) or (UNKNOWN_LINE,)
        site = CallSite(lines, operator)
        values, sizes, sources = self._arguments(named)
        operation = OperatorCall(values, sizes, len(self.run.sizes), self._tracker.path, scalars, sources)
        self.run.operations.setdefault(site, []).append(operation)
        function = self._function or _FunctionCall(operator, [])
        if not function.counted:
            function.counted = True
            self.run.functions.setdefault(CallSite(lines, function.name), []).append(self._tracker.path)
        return site

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
        if key not in self._allocations and not self.is_host(tensor):
            kind, name = self._owners.get(key, ("state written", f"a tensor {list(tensor.shape)} made before the run"))
            self._record(kind, f"{func} writes into {name}")

    def _record_allocation(self, tensor: Tensor, line: Line) -> None:
        form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        from_data = storage_key(tensor) in self._from_data
        allocation = Allocation(weakref.ref(tensor.untyped_storage()), line, self._tracker.path, form, from_data)
        self._allocations[storage_key(tensor)] = allocation

    def _arguments(self, named: dict[str, Any]) -> tuple[dict[str, Value], dict[str, int], dict[str, Set[Any]]]:
        """Return the values, the sizes of tensors and the sources of tensors among named arguments."""
        values: dict[str, Value] = {}
        sizes: dict[str, int] = {}
        sources: dict[str, Set[Any]] = {}
        given = self._function.tensors if self._function else []
        for name, value in (named | {"given": given}).items():
            leaves = [str(leaf) if isinstance(leaf, torch.dtype) else leaf for leaf in tree_leaves(value)]
            if leaves and all(isinstance(leaf, Number) for leaf in leaves):
                values[name] = tuple(leaves) if isinstance(value, list | tuple) else leaves[0]
            for at, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and self.is_host(leaf) and not leaf.dim():
                    values[name] = leaf.item()
                elif isinstance(leaf, Tensor) and has_storage(leaf):
                    if name != "given" and not self.is_host(leaf):
                        sources[name if leaf is value else f"{name}[{at}]"] = self._sources_of(leaf)
                    sizes[f"{name}[{at}].numel"] = leaf.numel()
                    sizes |= {f"{name}[{at}].shape[{dim}]": size for dim, size in enumerate(leaf.shape)}
        return values, sizes, sources

    def _sources_of(self, tensor: Tensor) -> Set[Any]:
        """Return the possible sources of a tensor, by name if it existed before the run."""
        key = storage_key(tensor)
        kind, name = self._owners.get(key, ("", ""))
        if kind == "state written" and key not in self._allocations:
            self.run.used.add(name)
        return self._sources.of(tensor)

    def _to_device(self, tensor: Tensor) -> Tensor:
        moved = tensor.clone()
        self.made_on_host.pop(storage_key(moved), None)
        self._record_allocation(moved, next(user_lines(), UNKNOWN_LINE))
        return moved

    @contextmanager
    def _suppress(self) -> Iterator[None]:
        self._suppressed += 1
        try:
            yield
        finally:
            self._suppressed -= 1
