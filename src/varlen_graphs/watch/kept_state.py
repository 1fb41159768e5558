"""What a module keeps between runs, copied, so that runs can be compared by what they leave behind, and undone."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from itertools import accumulate, count
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varlen_graphs.watch.code_state import Code, SlotAttributes, Variables, is_code, is_library
from varlen_graphs.watch.owners import DEPTH, PLAIN_TENSORS, is_ours
from varlen_graphs.watch.sharded import local_tensor

MOST_BYTES = 1 << 28
"""Bytes of tensors to copy, the smallest first. Of others, only writes that torch counts are found."""

_VALUES = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size, type(None))
HOOKS_INSTALLED = "_output_capturing_hooks_installed"
"""Set by transformers on a module with the hooks that it leaves there: without it, it would add them once more."""

CONSTANTS = "varlen_graphs.buffers.device_constants"
"""Objects from here follow from the declaration alone, whatever the rows."""

_OF_ANY_MODULE = frozenset({HOOKS_INSTALLED, *vars(nn.Module())}) - {"_parameters", "_buffers"}
_ABSENT = object()


class _Leaf(NamedTuple):
    """A value that a module keeps; of a tensor, also how often it was written, and a copy."""

    value: Any
    registered: bool  # as a parameter or buffer
    version: int = 0
    copy: Tensor | None = None


class KeptState:
    """Copy of parameters, buffers, plain attributes, variables of the code that may run, and what lies in these.

    Args:
        parts: The modules and their paths.
        also: Other callables and objects that run, by name.
    """

    def __init__(self, parts: Iterable[tuple[str, nn.Module]], also: Mapping[str, Any] | None = None) -> None:
        self._contents: list[tuple[Any, Any]] = []  # each container, and a copy of it
        self._leaves: dict[str, _Leaf] = {}
        self._seen: set[int] = set()
        self._code = Code()
        for path, part in parts:
            self._read_module(f"{path}." if path else "", part)
        for name, value in (also or {}).items():
            self._read(name, value, DEPTH)
        for variables in self._code.variables():
            self._read_variables(variables)
        self._copy_tensors()

    def differences(self, other: "KeptState") -> set[str]:
        """Return the paths where two states differ. Syncs with the device."""
        paths = self._leaves.keys() | other._leaves.keys()
        return {path for path in paths if not _alike(self._leaves.get(path), other._leaves.get(path))}

    def registered(self, path: str) -> bool:
        """Return True for the path of a parameter or buffer."""
        return path in self._leaves and self._leaves[path].registered

    def copied(self, path: str) -> bool:
        """Return False for the path of a tensor that is too large to be copied."""
        leaf = self._leaves.get(path)
        return leaf is None or not isinstance(leaf.value, Tensor) or leaf.copy is not None

    def restore(self) -> None:
        """Write back what has changed since, as far as it was copied."""
        for container, copy in self._contents:
            _restore(container, copy)
        for leaf in self._leaves.values():
            if leaf.copy is not None and not same_bits(local_tensor(leaf.value), leaf.copy):
                with torch.inference_mode(leaf.value.is_inference()), torch.no_grad():
                    tensor = local_tensor(leaf.value)
                    if tensor.shape != leaf.copy.shape:  # resized in place
                        tensor.resize_(leaf.copy.shape)
                    tensor.copy_(leaf.copy)

    def _read_module(self, start: str, part: nn.Module) -> None:
        if isinstance(part, torch.jit.ScriptModule):  # makes its tensors anew whenever it is asked
            for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                self._leaves[f"{start}{name}"] = _Leaf(tensor, True)
            return
        self._contents.append((vars(part), dict(vars(part))))
        for registry in (part._parameters, part._buffers):
            self._contents.append((registry, dict(registry)))
            self._leaves |= {f"{start}{name}": _Leaf(tensor, True) for name, tensor in registry.items()}
        self._contents.append((part._modules, dict(part._modules)))
        self._code.meet(type(part))
        for name, value in list(vars(part).items()):
            if name not in _OF_ANY_MODULE and name not in ("_parameters", "_buffers"):
                self._read(f"{start}{name}", value, DEPTH)

    def _read_variables(self, variables: Variables) -> None:
        values = variables.read()
        self._contents.append((variables, values))
        for name, value in values.items():
            self._code.meet(value)
            path = self._unused(f"{variables.path}.{name}")
            if is_library(value) and not isinstance(value, Tensor):
                self._leaves[path] = _Leaf(value, False)
            elif not is_code(value):
                self._read(path, value, DEPTH)

    def _unused(self, path: str) -> str:
        """Return a path, with a number if another function of the same name has it."""
        if path not in self._leaves:
            return path
        numbered = (f"{path} ({at})" for at in count(2))
        return next(one for one in numbered if one not in self._leaves)

    def _read(self, path: str, value: Any, depth: int) -> None:
        self._leaves[path] = _Leaf(value, False)
        if isinstance(value, (*_VALUES, nn.Module, Tensor)) or not depth or id(value) in self._seen or is_ours(value):
            return
        if type(value).__module__ == CONSTANTS:
            return
        self._code.meet(value)
        if is_code(value):
            return
        self._code.meet(type(value))
        self._seen.add(id(value))
        for at, part in self._parts(value):
            self._read(f"{path}{at}", part, depth - 1)

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)  # an object may claim to be of another class
        if issubclass(kind, dict):
            self._contents.append((value, dict(dict.items(value))))
            yield from [(f"[{key!r}]", part) for key, part in list(dict.items(value))]
        elif issubclass(kind, list | tuple):
            if issubclass(kind, list):
                self._contents.append((value, list(value)))
            yield from [(f"[{at}]", part) for at, part in enumerate(value)]
        elif issubclass(kind, set):
            self._contents.append((value, set(value)))
        elif issubclass(kind, deque):
            self._contents.append((value, list(value)))
            yield from [(f"[{at}]", part) for at, part in enumerate(list(value))]
        elif isinstance(value, MethodType):
            yield ".__self__", value.__self__
        elif isinstance(value, partial):
            yield from ((".args", value.args), (".keywords", value.keywords))
        elif isinstance(held := getattr(value, "__dict__", None), dict):
            self._contents.append((held, dict(held)))
            yield from [(f".{name}", part) for name, part in list(held.items())]
        elif hasattr(type(value), "__slots__") and not is_library(value):
            slots = SlotAttributes("", value)
            self._contents.append((slots, slots.read()))
            yield from [(f".{name}", part) for name, part in slots.read().items()]

    def _copy_tensors(self) -> None:
        tensors = {id(leaf.value): leaf.value for leaf in self._leaves.values() if can_copy(leaf.value)}
        ascending = sorted(tensors.values(), key=lambda tensor: tensor.nbytes)
        sizes = accumulate(tensor.nbytes for tensor in ascending)
        copies = {
            id(t): local_tensor(t).detach().clone()
            for t, size in zip(ascending, sizes, strict=True)
            if size <= MOST_BYTES
        }
        self._leaves |= {
            path: _Leaf(leaf.value, leaf.registered, version_of(leaf.value), copies.get(id(leaf.value)))
            for path, leaf in self._leaves.items()
            if isinstance(leaf.value, Tensor)
        }


def can_copy(value: Any) -> bool:
    """Return True for a tensor whose values can be copied and written back."""
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
        return False
    plain = local_tensor(value)
    return type(plain) in PLAIN_TENSORS and plain.layout is torch.strided and not plain.is_meta


def version_of(value: Any) -> int:
    """Return how often torch has counted a write into a tensor; 0 for what has no counter."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _alike(one: _Leaf | None, other: _Leaf | None) -> bool:
    if one is None or other is None or type(one.value) is not type(other.value):
        return False
    if isinstance(one.value, Tensor):
        if one.copy is not None and other.copy is not None:
            return same_bits(one.copy, other.copy)
        return one.value is not other.value or one.version == other.version
    if isinstance(one.value, float | complex) and one.value != one.value:  # NaN
        return bool(other.value != other.value)
    return not isinstance(one.value, _VALUES) or bool(one.value == other.value)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if tensors are equal bit for bit. Syncs with the device."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(one, other) or torch.equal(_bytes(one), _bytes(other))  # the latter if there are NaN


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _restore(container: Any, copy: Any) -> None:
    """Write back a container, entry by entry: another thread may be reading it. Code and hooks that came stay."""
    if isinstance(container, Variables):
        container.restore(copy)
    elif isinstance(container, dict):
        stays = {HOOKS_INSTALLED, *copy}
        for key in [key for key, value in dict.items(container) if key not in stays and not is_code(value)]:
            del container[key]
        for key, value in copy.items():
            now = dict.get(container, key, _ABSENT)
            if now is not value and not is_code(now):
                container[key] = value
    elif isinstance(container, list | deque):
        if len(container) != len(copy) or any(now is not value for now, value in zip(container, copy, strict=True)):
            if isinstance(container, list):
                container[:] = copy
            else:
                container.clear()
                container.extend(copy)
    elif container != copy:
        container.clear()
        container |= copy
