"""Where a module keeps its tensors."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper, partial, reduce
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varlen_graphs.watch.sharded import local

DEPTH = 4
"""How many containers, objects, functions or modules deep attributes are looked into."""

REGISTERED = ("_parameters", "_buffers", "_modules")
LEAVES = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

Step = Callable[[Any], Any]
"""From a value to a part of it."""


class Found(NamedTuple):
    """A tensor, or a module that is no registered part of the one that was asked.

    Attributes:
        path: How to get there, for people.
        value: The tensor or module.
        holder: Of a parameter, buffer or submodule: the dict that it is registered in, and under which name.
        module: Whose it is, then.
        way: Of anything else: where to begin, and the steps from there.
    """

    path: str
    value: Any
    holder: tuple[dict[str, Any], str] | None
    module: nn.Module | None
    way: tuple[Any, tuple[Step, ...]]

    def is_there(self) -> bool:
        """Whether the way, if that is how it was found, still leads to it."""
        start, steps = self.way
        try:
            return reduce(lambda value, step: step(value), steps, start) is self.value
        except (LookupError, AttributeError, TypeError, ValueError):
            return False


def reached_from(module: nn.Module, also: Mapping[str, Any] | None = None) -> Iterator[Found]:
    """The tensors that a module and what runs beside it, by name, reach, and modules that are none of its parts.

    That is parameters and buffers; what lies in plain attributes, in lists, dicts, tuples, objects and modules there;
    in caches (`functools.lru_cache`), closures and defaults of functions; and in the attributes of classes and the
    globals that a forward, the methods it calls or the functions these call name.
    """
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        seen.add(id(owner))
        start = f"{prefix}." if prefix else ""
        yield from _registered(start, owner, seen)
    kinds: dict[type, None] = {}
    for prefix, owner in module.named_modules():
        if not isinstance(owner, torch.jit.ScriptModule):
            start = f"{prefix}." if prefix else ""
            yield from _plain(start, owner, DEPTH, seen, (owner, ()))
            kinds[type(owner)] = None
    for name, value in (also or {}).items():
        yield from _within(name, value, DEPTH, seen, (value, ()))
    for kind in kinds:
        yield from _of_class(kind, DEPTH, seen)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a module reaches, by their paths from it."""
    for found in reached_from(module):
        if isinstance(found.value, Tensor):
            yield found.path, found.value


def describe(tensor: Tensor) -> str:
    """The dtype and shape of a tensor, as messages give them."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's memory, or of what this rank has of it; 0 where it has none of its own."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or made of other tensors
        return 0


def _registered(start: str, owner: nn.Module, seen: set[int]) -> Iterator[Found]:
    """Parameters and buffers of one module."""
    if isinstance(owner, torch.jit.ScriptModule):  # makes its tensors anew whenever it is asked
        for name, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
            yield Found(f"{start}{name}", tensor, None, None, (tensor, ()))
        return
    for values in (owner._parameters, owner._buffers):
        for name, value in values.items():
            if isinstance(value, Tensor):
                yield Found(f"{start}{name}", value, (values, name), owner, (value, ()))
                if id(value) not in seen:
                    seen.add(id(value))
                    yield from _inside(f"{start}{name}", value, DEPTH - 1, seen, (value, ()))


def _plain(
    start: str, owner: nn.Module, depth: int, seen: set[int], way: tuple[Any, tuple[Step, ...]]
) -> Iterator[Found]:
    """What lies in the plain attributes of one module."""
    begin, steps = way
    for name, value in vars(owner).items():
        if name not in REGISTERED:
            yield from _within(f"{start}{name}", value, depth, seen, (begin, (*steps, partial(_attribute, name))))


def _within(path: str, value: Any, depth: int, seen: set[int], way: tuple[Any, tuple[Step, ...]]) -> Iterator[Found]:
    """What is reached from a value that was not seen yet."""
    if isinstance(value, LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor | nn.Module) and not _is_ours(value):
        yield Found(path, value, None, None, way)
    if depth:
        yield from _inside(path, value, depth - 1, seen, way)


def _inside(path: str, value: Any, depth: int, seen: set[int], way: tuple[Any, tuple[Step, ...]]) -> Iterator[Found]:
    if isinstance(value, nn.Module):
        yield from _outside(path, value, depth, seen)
        return
    start, steps = way
    for at, part, step in _parts(value):
        yield from _within(f"{path}{at}", part, depth, seen, (start, (*steps, step)))


def _outside(path: str, module: nn.Module, depth: int, seen: set[int]) -> Iterator[Found]:
    """What a module holds that is no registered part of the one that was asked; its submodules too."""
    if _is_ours(module):
        return
    parts = [(prefix, owner) for prefix, owner in module.named_modules() if owner is module or id(owner) not in seen]
    for prefix, owner in parts:
        seen.add(id(owner))
        start = f"{path}.{prefix}." if prefix else f"{path}."
        yield from _registered(start, owner, seen)
        if not isinstance(owner, torch.jit.ScriptModule):
            for name, child in owner._modules.items():
                if child is not None:
                    yield Found(f"{start}{name}", child, (owner._modules, name), owner, (child, ()))
            yield from _plain(start, owner, depth, seen, (owner, ()))


def _of_class(kind: type, depth: int, seen: set[int]) -> Iterator[Found]:
    """What the classes of a module hold, and what the forward and the methods that it names reach."""
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
            new = set() if code is None else _names(code) - known
            known |= new
            names += new


def _parts(value: Any) -> Iterator[tuple[str, Any, Step]]:
    """What a value consists of, how a path goes on to it, and how to get it."""
    if isinstance(value, dict):
        yield from [(f"[{key!r}]", part, itemgetter(key)) for key, part in list(value.items())]
    elif isinstance(value, list | tuple):
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
    elif not isinstance(value, type | ModuleType) and not _is_ours(value):
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
        yield from [(f".{name}", part, partial(_in_cell, cell)) for part in _content(cell)]
    if function.__defaults__:
        yield ".__defaults__", function.__defaults__, attrgetter("__defaults__")
    if function.__kwdefaults__:
        yield ".__kwdefaults__", function.__kwdefaults__, attrgetter("__kwdefaults__")
    if wrapped := vars(function).get("__wrapped__"):
        yield "", wrapped, attrgetter("__wrapped__")
    outer = function.__globals__
    for name in sorted(_names(function.__code__) & outer.keys()):
        part = outer[name]
        if isinstance(part, _GLOBALS) or type(part).__module__ == function.__module__:
            yield f".{name}", part, partial(_global, outer, name)


_GLOBALS = (Tensor, nn.Module, list, dict, tuple, FunctionType, _lru_cache_wrapper, partial)
"""Globals that are followed; and objects of classes that are defined beside them."""


def _names(code: CodeType) -> set[str]:
    """Globals, attributes and methods that a function names, or one inside of it."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _attribute(name: str, value: Any) -> Any:
    return vars(value)[name]


def _itself(part: Any, value: Any) -> Any:
    return part


def _in_cell(cell: Any, value: Any) -> Any:
    return cell.cell_contents


def _global(outer: dict[str, Any], name: str, value: Any) -> Any:
    return outer[name]


def _content(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not filled yet
        return ()


def _is_ours(value: Any) -> bool:
    """Whether this is an encoder in the place of a forward, or part of one."""
    name = type(getattr(value, "__self__", value)).__module__  # an encoder's bound method is its own
    return name.startswith("varlen_graphs.") and not name.startswith(
        ("varlen_graphs.buffers", "varlen_graphs.spec.normalize")
    )


PLAIN = (Tensor, nn.Parameter)
"""Types whose tensors have memory of their own, not that of tensors they are made of."""


def with_owners(tensors: Sequence[Tensor], module: nn.Module) -> list[str]:
    """What tensors are and where a module keeps them: one line for each memory, for people."""
    paths = {tensor.untyped_storage().data_ptr(): path for path, tensor in tensors_of(module) if type(tensor) in PLAIN}
    memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return [
        f"{paths[address]!r}, {describe(tensor)}"
        if address in paths
        else f"{describe(tensor)}, not reachable from the module"
        for address, tensor in memory.items()
    ]
