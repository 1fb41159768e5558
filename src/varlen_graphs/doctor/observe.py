"""One run of a module, observed: what a capture would refuse is noted, and the run goes on."""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from varlen_graphs.doctor.examples import Number
from varlen_graphs.doctor.modules import Running
from varlen_graphs.doctor.runs import Made, Operation, Run, Sighting, Site, Value
from varlen_graphs.doctor.scalars import scalars_of
from varlen_graphs.watch.launches import triton_launches
from varlen_graphs.watch.lines import UNKNOWN, Line, raising_line, user_lines
from varlen_graphs.watch.rules import (
    Offence,
    draws_random_numbers,
    has_storage,
    makes_on_host,
    named_arguments,
    written_arguments,
)
from varlen_graphs.watch.watch import Watch

aten = torch.ops.aten

_SIZES = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.__len__)  # type: ignore[attr-defined]


@dataclass
class _Function:
    """A function of torch that is being called: operations are counted once for each of its calls."""

    name: str
    tensors: list[Tensor]
    counted: bool = False


def observe(
    run: Callable[[], Any],
    running: Running,
    device: torch.device,
    owners: dict[int, tuple[str, str]],
    on_host: dict[int, Tensor],
) -> Run:
    """Run something eager, without gradients, and say what it did. It may raise.

    Args:
        run: What to run; its output is dropped.
        running: Tells which submodule runs.
        device: Where the module is.
        owners: What there is before the run, by `storage_key`: a kind, for when it is written, and a name.
        on_host: Host tensors that earlier runs made; this one's are added.
    """
    observer = _Observer(running, device, owners, on_host)
    try:
        with torch.inference_mode(False), torch.no_grad(), running, observer, triton_launches(observer.launching):
            run()
    except Exception as error:
        what = shorten(f"it raised {type(error).__name__}: {error}", 300)
        trace = error.__traceback__
        observer.run.error = Sighting("error", what, raising_line(trace), running.path_of(trace))
        return observer.run
    if observer.alive():
        gc.collect()  # what only cycles hold is not kept
    observer.run.kept = observer.alive()
    return observer.run


def storage_key(tensor: Tensor) -> int:
    """What tells the memory of a tensor from that of others, as long as it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


class _Observer(Watch):
    """Notes offences where `Watch` raises at the first.

    On the CPU a copy between host and device returns the tensor itself, which would be two tensors on a GPU: here it
    is copied, so that what follows is told apart as there.
    """

    def __init__(
        self,
        running: Running,
        device: torch.device,
        owners: dict[int, tuple[str, str]],
        on_host: dict[int, Tensor],
    ) -> None:
        super().__init__(device, "the module")
        self._made_on_host = on_host
        self.run = Run()
        self._made: dict[int, Made] = {}
        self._running = running
        self._owners = owners
        self._function: _Function | None = None
        self._sizes_read: Counter[Line] = Counter()
        self._aside = 0  # inside of what was noted already, or of the host

    def alive(self) -> list[Made]:
        """What was made and is not gone."""
        return [made for made in self._made.values() if made.storage() is not None]

    def refuse(self, offence: Offence) -> None:
        """Note an offence."""
        if not self._aside:
            self._note(offence.kind, offence.what)

    def refuse_function(self, offence: Offence, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note an offence, and do what was asked for."""
        self.refuse(offence)
        emulated = self._device.type == "cpu"
        with self._set_aside():
            if emulated and offence.kind == "copy to host":
                args = (args[0].clone(), *args[1:])
            result = func(*args, **kwargs)
            if emulated and offence.kind == "copy to host":
                tree_map_only(Tensor, self.mark_host, result)
            if emulated and offence.kind == "copy to device":
                result = tree_map_only(Tensor, self._to_device, result)
        self._note_read(result)
        return result

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Call a function, whose operators may take sizes from its tensors; of host tensors a graph sees nothing."""
        if not tensors and makes_on_host(kwargs):
            with self._set_aside():
                return super().call(func, args, kwargs, tensors)
        self._function = _Function(str(getattr(func, "__name__", func)), tensors)
        try:
            result = super().call(func, args, kwargs, tensors)
        finally:
            self._function = None
        if func in _SIZES and not self._aside:
            self._note_sizes(result)
        return result

    def launching(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Note a Triton launch that no operator announces."""
        if self.inside or self.thread != threading.get_ident():
            return nullcontext()
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        if callable(named.get("grid")):
            named["grid"] = tuple(named["grid"](named))
        self._note_operation(f"the kernel {kernel.__name__}", named)
        return self._set_aside()  # the interpreter of Triton copies tensors

    def seen(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Note an operation, what it writes and what it makes."""
        if func is aten._local_scalar_dense.default:
            self._note_read(results)
        if self._aside:
            return
        named: dict[str, Any] = {str(at): value for at, value in enumerate(args)} | kwargs
        if isinstance(func, torch._ops.OpOverload):
            named = named_arguments(func, args, kwargs)
            if draws_random_numbers(func, args, kwargs) and kwargs.get("generator") is None:
                self._note("random numbers", f"{func} draws random numbers")
            for tensor in written_arguments(func, args, kwargs):
                self._note_write(func, tensor)
        line = self._note_operation(str(func), named, scalars_of(func, results))
        known = {storage_key(tensor) for tensor in inputs}
        for result in results:
            if isinstance(result, Tensor) and storage_key(result) not in known:
                self._note_made(result, line)

    def _note(self, kind: str, what: str) -> None:
        line = next(user_lines(), UNKNOWN)
        self.run.sightings.append(Sighting(kind, what, line, self._running.path))

    def _note_operation(self, operator: str, named: dict[str, Any], scalars: frozenset[str] = frozenset()) -> Line:
        lines = tuple(user_lines()) or (UNKNOWN,)
        operation = Operation(*self._values_and_sizes(named), len(self.run.sizes), self._running.path, scalars)
        self.run.operations.setdefault(Site(lines, operator), []).append(operation)
        function = self._function or _Function(operator, [])
        if not function.counted:
            function.counted = True
            self.run.functions.setdefault(Site(lines, function.name), []).append(self._running.path)
        return lines[0]

    def _note_read(self, result: Any) -> None:
        numbers = {leaf for leaf in tree_leaves(result) if isinstance(leaf, bool | int | float)}
        if numbers:
            self.run.reads.setdefault(next(user_lines(), UNKNOWN), set()).update(numbers)

    def _note_sizes(self, sizes: Any) -> None:
        line = next(user_lines(), UNKNOWN)
        self._sizes_read[line] += 1
        for dim, size in enumerate(sizes if isinstance(sizes, tuple) else (sizes,)):
            self.run.sizes.append((f"{line.file}:{line.number}, {self._sizes_read[line]}, {dim}", size))

    def _note_write(self, func: Any, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._made and not self.is_host(tensor):
            kind, name = self._owners.get(key, ("state written", f"a tensor {list(tensor.shape)} made before the run"))
            self._note(kind, f"{func} writes into {name}")

    def _note_made(self, tensor: Tensor, line: Line) -> None:
        form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        made = Made(weakref.ref(tensor.untyped_storage()), line, self._running.path, form)
        self._made[storage_key(tensor)] = made

    def _values_and_sizes(self, named: dict[str, Any]) -> tuple[dict[str, Value], dict[str, int]]:
        values: dict[str, Value] = {}
        sizes: dict[str, int] = {}
        given = self._function.tensors if self._function else []
        for name, value in (named | {"given": given}).items():
            leaves = tree_leaves(value)
            if leaves and all(isinstance(leaf, Number) for leaf in leaves):
                values[name] = tuple(leaves) if isinstance(value, list | tuple) else leaves[0]
            for at, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and self.is_host(leaf) and not leaf.dim():
                    values[name] = leaf.item()
                elif isinstance(leaf, Tensor) and has_storage(leaf):
                    if name != "given" and (own := self._own_name(leaf)):
                        values[name if leaf is value else f"{name}[{at}]"] = own
                    sizes[f"{name}[{at}].numel"] = leaf.numel()
                    sizes |= {f"{name}[{at}].shape[{dim}]": size for dim, size in enumerate(leaf.shape)}
        return values, sizes

    def _own_name(self, tensor: Tensor) -> str | None:
        """What the module calls a tensor that it had before the run."""
        key = storage_key(tensor)
        kind, name = self._owners.get(key, ("", ""))
        if kind != "state written" or key in self._made:
            return None
        self.run.used.add(name)
        return name

    def _to_device(self, tensor: Tensor) -> Tensor:
        moved = tensor.clone()
        self._made_on_host.pop(storage_key(moved), None)
        self._note_made(moved, next(user_lines(), UNKNOWN))
        return moved

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1
