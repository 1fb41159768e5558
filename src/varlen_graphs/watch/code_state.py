"""Variables that code keeps beside its arguments: globals, closures, caches, class and function attributes."""

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import _lru_cache_wrapper, cached_property, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from varlen_graphs.watch.owners import content, is_ours, names_in

LIBRARIES = frozenset({"einops", "logging", "numpy", "torch", "triton", "varlen_graphs"})
"""Packages whose own variables keep nothing of the rows that they run on, as those of the standard library."""

_ABSENT = object()


class Variables:
    """Some variables by name.

    Attributes:
        path: What they belong to, for messages.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """Return those that are set."""
        raise NotImplementedError

    def restore(self, before: dict[str, Any]) -> None:
        """Set them as they were. What is code by now, such as a function that was imported, stays."""
        now = self.read()
        for name in before.keys() | now.keys():
            was, current = before.get(name, _ABSENT), now.get(name, _ABSENT)
            if was is not current and not is_code(current):
                self._delete(name) if was is _ABSENT else self._set(name, was)

    def _set(self, name: str, value: Any) -> None:
        raise NotImplementedError

    def _delete(self, name: str) -> None:
        raise NotImplementedError


class _DictEntries(Variables):
    """Entries of a dict, all or those of some names: globals, or attributes of a function."""

    def __init__(self, path: str, own: dict[str, Any], names: set[str] | None = None) -> None:
        super().__init__(path)
        self._own = own
        self._names = names

    def read(self) -> dict[str, Any]:
        if self._names is None:
            return dict(self._own)
        found = [(name, self._own.get(name, _ABSENT)) for name in sorted(self._names & self._own.keys())]
        return {name: value for name, value in found if value is not _ABSENT}

    def _set(self, name: str, value: Any) -> None:
        self._own[name] = value

    def _delete(self, name: str) -> None:
        self._own.pop(name, None)


class _ClassAttributes(Variables):
    """Attributes of a class, without those that it inherits."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind.__name__)
        self._kind = kind

    def read(self) -> dict[str, Any]:
        own = list(vars(self._kind).items())
        return {name: value for name, value in own if not (name.startswith("__") or isinstance(value, _METHODS))}

    def _set(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)

    def _delete(self, name: str) -> None:
        delattr(self._kind, name)


class _Closure(Variables):
    """Variables of the functions around a function."""

    def __init__(self, path: str, cells: dict[str, Any]) -> None:
        super().__init__(path)
        self._cells = cells

    def read(self) -> dict[str, Any]:
        return {name: value for name, cell in self._cells.items() for value in content(cell)}

    def _set(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def _delete(self, name: str) -> None:
        del self._cells[name].cell_contents


class SlotAttributes(Variables):
    """Attributes of an object whose class declares `__slots__`."""

    def __init__(self, path: str, owner: Any) -> None:
        super().__init__(path)
        self._owner = owner

    def read(self) -> dict[str, Any]:
        """Return those that are set."""
        names = [name for kind in type(self._owner).__mro__ for name in _tuple(vars(kind).get("__slots__", ()))]
        return {name: getattr(self._owner, name) for name in names if hasattr(self._owner, name)}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def _delete(self, name: str) -> None:
        object.__delattr__(self._owner, name)


class _CachedResults(Variables):
    """Results that `functools.lru_cache` keeps, and their keys. They cannot be put back, so all are dropped."""

    def __init__(self, path: str, cache: Any) -> None:
        super().__init__(path)
        self._cache = cache

    def read(self) -> dict[str, Any]:
        held: list[Any] = []
        for part in gc.get_referents(self._cache):
            if isinstance(part, dict) and part is not vars(self._cache):
                held += [*part.keys(), *part.values()]
            elif not is_code(part) and not isinstance(part, dict):
                held.append(part)
        return {str(at): part for at, part in enumerate(held)}

    def restore(self, before: dict[str, Any]) -> None:
        now = self.read()
        if now.keys() != before.keys() or any(now[at] is not before[at] for at in now):
            self._cache.cache_clear()


class Code:
    """The functions that may run, and the variables that they use.

    Calls are followed by name: a function may call every function of a name in it, in its Python module, in those that
    it names, and in the classes met so far.
    """

    def __init__(self) -> None:
        self._names = {"forward", "__call__"}
        self._waiting: deque[Any] = deque()
        self._classes: list[type] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id is used again
        self._globals_seen: dict[int, set[str]] = {}  # by their dict

    def meet(self, value: Any) -> None:
        """Take a function, method or class that may be called, or an object whose methods may; ignores others."""
        for part in _functions(value):
            if id(part) not in self._seen and not _is_library(part.__module__):
                self._seen.add(id(part))
                self._kept.append(part)
                self._waiting.append(part)

    def variables(self) -> Iterator[Variables]:
        """Yield the variables of all that was met, and is until the end."""
        while self._waiting:
            while self._waiting:
                yield from self._variables(self._waiting.popleft())
            for kind in self._classes:
                for name in sorted(self._names & vars(kind).keys()):
                    self.meet(vars(kind)[name])

    def _variables(self, part: Any) -> Iterator[Variables]:
        if isinstance(part, type):
            self._classes.append(part)
            yield _ClassAttributes(part)
        elif isinstance(part, _lru_cache_wrapper):
            yield _CachedResults(f"{_name(part)} (cached)", part)
        else:
            names = names_in(part.__code__)
            self._names |= names
            cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
            own = {name: cell for name, cell in cells if id(cell) not in self._seen}
            self._seen.update(map(id, own.values()))
            yield _Closure(_name(part), own)
            yield _DictEntries(_name(part), {"__defaults__": part.__defaults__, "__kwdefaults__": part.__kwdefaults__})
            yield _DictEntries(_name(part), vars(part))
            yield from self._globals(part.__globals__, names)

    def _globals(self, outer: dict[str, Any], names: set[str]) -> Iterator[Variables]:
        yield self._new_globals(outer.get("__name__", "globals"), outer, names)
        for name in sorted(names & outer.keys()):
            other = outer[name]
            if isinstance(other, ModuleType) and not _is_library(other.__name__):
                yield self._new_globals(other.__name__, vars(other), names)

    def _new_globals(self, path: str, own: dict[str, Any], names: set[str]) -> Variables:
        """Return those globals of some names that no function met before uses."""
        seen = self._globals_seen.setdefault(id(own), set())
        new = names - seen
        seen |= new
        return _DictEntries(path, own, new)


def is_code(value: Any) -> bool:
    """Return True for functions, classes and modules, which hold no data unless they are closures."""
    if isinstance(value, FunctionType):
        return not value.__closure__
    return isinstance(value, _CODE) or is_ours(value)


_METHODS = (FunctionType, _lru_cache_wrapper, property, staticmethod, classmethod, cached_property)
_CODE = (type, ModuleType, BuiltinFunctionType, *_METHODS[1:])


def is_library(value: Any) -> bool:
    """Return True for an object of a library, which keeps nothing of rows beside what its owner gives it."""
    return type(value).__module__.partition(".")[0] in LIBRARIES


def _is_library(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    return package in LIBRARIES or package in sys.stdlib_module_names


def _functions(value: Any) -> Sequence[Any]:
    """Return the functions and classes whose code runs if a value is called or used."""
    if isinstance(value, FunctionType | type):
        return [value] if isinstance(value, FunctionType) else value.__mro__
    if isinstance(value, _lru_cache_wrapper):
        return [value, *_functions(value.__wrapped__)]
    if isinstance(value, MethodType | staticmethod | classmethod):
        return _functions(value.__func__)
    if isinstance(value, partial | cached_property):
        return _functions(value.func)
    if isinstance(value, property):
        return [function for function in (value.fget, value.fset) if isinstance(function, FunctionType)]
    return []


def _tuple(slots: str | Iterable[str]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _name(function: Any) -> str:
    return str(function.__qualname__).replace(".<locals>", "")
