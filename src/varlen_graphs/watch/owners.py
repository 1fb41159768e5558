"""Search for the tensors and modules that a module reaches, and for the paths to them."""

import dis
import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper, lru_cache, partial, reduce
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varlen_graphs.watch.sharded import local_tensor
from varlen_graphs.watch.slots import Place

DEPTH = 4
"""Attributes are searched through this many levels of containers, objects, functions and modules."""

REGISTERED = ("_parameters", "_buffers", "_modules")
LEAVES = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

Step = Callable[[Any], Any]
"""Function from a value to a part of it."""

Access = tuple[Any, tuple[Step, ...]]
"""Object at which to start, and the steps from there."""


class ReachableValue(NamedTuple):
    """Tensor reachable from a module, or module that is reachable but not registered as a part of it."""

    path: str  # for messages
    value: Any
    holder: Place | None  # of a parameter, buffer or submodule
    module: nn.Module | None  # that registers it
    access: Access  # for values without a holder

    def still_reachable(self) -> bool:
        """Return True if the access steps, if there are any, still lead to the value."""
        start, steps = self.access
        try:
            return reduce(lambda value, step: step(value), steps, start) is self.value
        except (LookupError, AttributeError, TypeError, ValueError):
            return False


def reachable_values(module: nn.Module, also: Mapping[str, Any] | None = None) -> Iterator[ReachableValue]:
    """Yield the tensors that a module reaches, and the modules that it reaches but does not register.

    The search covers parameters and buffers; plain attributes, with lists, dicts, tuples, objects and modules in them;
    caches (`functools.lru_cache`), closures and defaults of functions; attributes of classes; and the globals named by
    the forward, by methods it calls, or by functions that these call. Callables and objects in `also`, by name, are
    searched too.
    """
    seen: set[int] = set()
    owners = [(f"{prefix}." if prefix else "", owner) for prefix, owner in module.named_modules()]
    for start, owner in owners:
        seen.add(id(owner))
        yield from _registered(start, owner, seen)
    kinds: dict[type, None] = {}
    for start, owner in owners:
        if not isinstance(owner, torch.jit.ScriptModule):
            yield from _plain(start, owner, DEPTH, seen, (owner, ()))
            kinds[type(owner)] = None
    for name, value in (also or {}).items():
        yield from _within(name, value, DEPTH, seen, (value, ()))
    for kind in kinds:
        yield from _of_class(kind, DEPTH, seen)


def reachable_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and value of each tensor that a module reaches."""
    for found in reachable_values(module):
        if isinstance(found.value, Tensor):
            yield found.path, found.value


def describe(tensor: Tensor) -> str:
    """Return the dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def address_of(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor, or of its local shard; 0 if it has no storage of its own."""
    try:
        return local_tensor(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or made of other tensors
        return 0


def _registered(start: str, owner: nn.Module, seen: set[int]) -> Iterator[ReachableValue]:
    """Yield the parameters and buffers of one module."""
    if isinstance(owner, torch.jit.ScriptModule):  # makes its tensors anew whenever it is asked
        for name, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
            yield ReachableValue(f"{start}{name}", tensor, None, None, (tensor, ()))
        return
    for registry in REGISTERED[:2]:
        for name, value in vars(owner).get(registry, {}).items():
            if isinstance(value, Tensor):
                place = Place(vars(owner), registry, name)
                yield ReachableValue(f"{start}{name}", value, place, owner, (value, ()))
                if id(value) not in seen:
                    seen.add(id(value))
                    yield from _inside(f"{start}{name}", value, DEPTH - 1, seen, (value, ()))


def _plain(start: str, owner: nn.Module, depth: int, seen: set[int], access: Access) -> Iterator[ReachableValue]:
    """Yield what the plain attributes of one module reach."""
    begin, steps = access
    for name, value in vars(owner).items():
        if name not in REGISTERED:
            yield from _within(f"{start}{name}", value, depth, seen, (begin, (*steps, partial(_attribute, name))))


def _within(path: str, value: Any, depth: int, seen: set[int], access: Access) -> Iterator[ReachableValue]:
    """Yield a value, if it was not seen yet, and what it reaches."""
    if isinstance(value, LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor | nn.Module) and not is_ours(value):
        yield ReachableValue(path, value, None, None, access)
    if depth:
        yield from _inside(path, value, depth - 1, seen, access)


def _inside(path: str, value: Any, depth: int, seen: set[int], access: Access) -> Iterator[ReachableValue]:
    if isinstance(value, nn.Module):
        yield from _outside(path, value, depth, seen)
        return
    start, steps = access
    for at, part, step in _parts(value):
        yield from _within(f"{path}{at}", part, depth, seen, (start, (*steps, step)))


def _outside(path: str, module: nn.Module, depth: int, seen: set[int]) -> Iterator[ReachableValue]:
    """Yield what an unregistered module and its submodules hold."""
    if is_ours(module):
        return
    parts = [(prefix, owner) for prefix, owner in module.named_modules() if owner is module or id(owner) not in seen]
    for prefix, owner in parts:
        seen.add(id(owner))
        start = f"{path}.{prefix}." if prefix else f"{path}."
        yield from _registered(start, owner, seen)
        if not isinstance(owner, torch.jit.ScriptModule):
            for name, child in owner._modules.items():
                if child is not None:
                    place = Place(vars(owner), "_modules", name)
                    yield ReachableValue(f"{start}{name}", child, place, owner, (child, ()))
            yield from _plain(start, owner, depth, seen, (owner, ()))


def _of_class(kind: type, depth: int, seen: set[int]) -> Iterator[ReachableValue]:
    """Yield what the classes of a module hold, and what the forward and the methods it names reach."""
    classes = [cls for cls in kind.__mro__ if not cls.__module__.startswith("torch.") and cls is not object]
    for cls in classes:
        for name, value in list(vars(cls).items()):
            if isinstance(value, Tensor | nn.Module | list | tuple | dict):
                yield from _within(f"{cls.__name__}.{name}", value, depth, seen, (cls, (partial(_attribute, name),)))
    names, known = ["forward"], {"forward"}
    while names and classes:
        name = names.pop()
        method = getattr(kind, name, None)
        if isinstance(method, FunctionType | _lru_cache_wrapper):
            yield from _within(f"{kind.__name__}.{name}", method, depth, seen, (method, ()))
            code = getattr(method, "__code__", None)
            new = set() if code is None else names_in(code) - known
            known |= new
            names += new


def _parts(value: Any) -> Iterator[tuple[str, Any, Step]]:
    """Yield the path suffix, value and access step of each part of a value."""
    if isinstance(value, dict):
        yield from [(f"[{key!r}]", part, itemgetter(key)) for key, part in list(value.items())]
    elif isinstance(value, list | tuple | deque):
        yield from [(f"[{at}]", part, itemgetter(at)) for at, part in enumerate(value)]
    elif isinstance(value, set | frozenset):
        yield from [(f"[{at}]", part, partial(_itself, part)) for at, part in enumerate(list(value))]
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, MethodType):
        yield "", value.__func__, attrgetter("__func__")
        yield ".__self__", value.__self__, attrgetter("__self__")
    elif isinstance(value, partial):
        yield "", value.func, attrgetter("func")
        yield ".args", value.args, attrgetter("args")
        yield ".keywords", value.keywords, attrgetter("keywords")
    elif isinstance(value, _lru_cache_wrapper):
        yield "", value.__wrapped__, attrgetter("__wrapped__")
        yield from [(" (cached)", part, partial(_itself, part)) for part in gc.get_referents(value)]
    elif not isinstance(value, type | ModuleType) and not is_ours(value):
        held = getattr(value, "__dict__", None) or {}
        yield from [(f".{name}", part, partial(_attribute, name)) for name, part in list(held.items())]
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
            names = [name for name in value.__tensor_flatten__()[0] if name not in held]
            yield from [(f".{name}", getattr(value, name), attrgetter(name)) for name in names]


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any, Step]]:
    if (function.__module__ or "torch").partition(".")[0] == "torch":
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        yield from [(f".{name}", part, partial(_in_cell, cell)) for part in content(cell)]
    if function.__defaults__:
        yield ".__defaults__", function.__defaults__, attrgetter("__defaults__")
    if function.__kwdefaults__:
        yield ".__kwdefaults__", function.__kwdefaults__, attrgetter("__kwdefaults__")
    if wrapped := vars(function).get("__wrapped__"):
        yield "", wrapped, attrgetter("__wrapped__")
    outer = function.__globals__
    for name in sorted(globals_in(function.__code__) & outer.keys()):
        part = outer[name]
        if isinstance(part, _GLOBALS) or type(part).__module__ == function.__module__:
            yield f".{name}", part, partial(_global, outer, name)


_GLOBALS = (Tensor, nn.Module, list, dict, tuple, FunctionType, _lru_cache_wrapper, partial)
"""Types of globals that are searched, beside objects of classes defined in the same module."""


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals, attributes and methods in a function and in the functions nested in it."""
    return set(code.co_names).union(*(names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


@lru_cache(4096)
def globals_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals in a function and in the functions nested in it, without those of attributes."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own.union(*(globals_in(inner) for inner in code.co_consts if isinstance(inner, CodeType))))


def _attribute(name: str, value: Any) -> Any:
    return vars(value)[name]


def _itself(part: Any, value: Any) -> Any:
    return part


def _in_cell(cell: Any, value: Any) -> Any:
    return cell.cell_contents


def _global(outer: dict[str, Any], name: str, value: Any) -> Any:
    return outer[name]


def content(cell: Any) -> tuple[Any, ...]:
    """Return the value of a closure's cell, if it is set."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty cell
        return ()


def is_ours(value: Any) -> bool:
    """Return True for objects of this library that are not searched, such as an encoder installed as a forward."""
    name = type(getattr(value, "__self__", value)).__module__  # a bound method belongs to its encoder
    return name.startswith("varlen_graphs.") and not name.startswith(_TENSOR_HOLDERS)


_TENSOR_HOLDERS = (
    "varlen_graphs.buffers",
    "varlen_graphs.layout.entry_counts",
    "varlen_graphs.spec.batch_rows",
    "varlen_graphs.spec.normalize",
    "varlen_graphs.spec.patches",
)
"""Modules of this library whose objects hold tensors that graphs read."""


PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Tensor types with memory of their own; subclasses may consist of other tensors."""


def describe_with_owners(tensors: Sequence[Tensor], module: nn.Module) -> list[str]:
    """Describe each distinct storage of some tensors, with the path where the module keeps it."""
    if not tensors:
        return []
    reachable = [(path, tensor) for path, tensor in reachable_tensors(module) if type(tensor) in PLAIN_TENSORS]
    paths = {tensor.untyped_storage().data_ptr(): path for path, tensor in reachable}
    descriptions = {}
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if address in paths:
            descriptions[address] = f"{paths[address]!r}, {describe(tensor)}"
        else:
            descriptions[address] = f"{describe(tensor)}, not reachable from the module"
    return [*descriptions.values()]
