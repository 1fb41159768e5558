"""A shadow of a module: the same weights, and everything else its own, for runs beside those of calls.

A run of the shadow writes into the shadow what a module keeps between calls: nothing has to be undone.
"""

import ctypes
import io
import itertools
import random
import sys
import threading
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from functools import _lru_cache_wrapper, lru_cache, partial
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from varlen_graphs.shadows.constants import DeviceConstants, NotCopied
from varlen_graphs.shadows.snapshot import ABSENT, ATOMS, Changed, Place, Snapshot, entries_of, slots_of
from varlen_graphs.torch_dispatch.random_stream import RandomStream
from varlen_graphs.torch_dispatch.sharded import local_tensor

REGISTRIES = ("_parameters", "_buffers", "_modules")

MOST_BYTES = 1 << 28
"""Bytes of tensors and arrays to copy in all; one may take an eighth of it. Others are shared."""

MOST_ENTRIES = 10_000
"""Length of a container above which its entries are shared: it holds data, not parts."""

_CONTAINERS = (dict, list, set, deque)
_OF_PYTHON: frozenset[type] = frozenset({dict, list, set, deque, OrderedDict, defaultdict})
"""Containers whose own `copy` is several times as fast as `copy.copy`; a module has a dozen of them."""

_ITERATORS: tuple[type, ...] = (
    itertools.count,
    itertools.repeat,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
)
_COPYABLE = (*_ITERATORS, random.Random, io.StringIO, io.BytesIO)
"""Types of C whose objects `copy.copy` copies with their state."""

_OF_C: tuple[Any, ...] = (ctypes.c_int.__base__, ctypes.Array, ctypes.Structure, ctypes.Union)

_LIBRARIES = frozenset({"numpy", "torch", "triton", "varlen_graphs"})
_OF_PLAIN = ("__new__", "__reduce__", "__reduce_ex__", "__getattribute__")

DECLARATIONS = tuple(
    f"varlen_graphs.{name}"
    for name in (
        "buffers",
        "inputs.normalize",
        "inputs.patches",
        "layouts.entry_counts",
        "outputs.batch_rows",
        "recipes",
    )
)
"""Modules of this library whose objects run beside a module, and may hold tensors or functions over its parts."""


HOSTS: set[str] = set()
"""Packages whose objects are of the program around, such as the configuration of an engine: shared, not looked into.

Integrations add those of their engine.
"""


class Held(NamedTuple):
    """A tensor or module that a module holds: in a registry, as an attribute, in a container, an object or a closure.

    Attributes:
        path: Path from the module.
        value: As it was found.
        place: Place of it, if that is a dict.
    """

    path: str
    value: Any
    place: Place | None = None


class Cloned(NamedTuple):
    """A tensor of the original, and its clone."""

    path: str
    original: Tensor
    clone: Tensor


class _Memory(NamedTuple):
    """Memory of an object of the host, such as an array, and that of its copy, in bytes."""

    original: Tensor
    own: Tensor

    def of(self, tensor: Tensor) -> tuple[torch.UntypedStorage, int] | None:
        """Return the copy of the storage of a tensor and its offset there; `None` if it lies elsewhere."""
        start = address_of(tensor) - self.original.data_ptr()
        inside = 0 <= start <= start + tensor.untyped_storage().nbytes() <= len(self.original)
        if not inside or tensor.device.type != "cpu" or start % tensor.itemsize:
            return None
        return self.own.untyped_storage(), start // tensor.itemsize + int(tensor.storage_offset())


class Shadow:
    """A copy of a module with parts, objects and containers of its own.

    Parameters and `DeviceConstants` are shared; so are larger tensors and those of other than plain types, and what
    cannot be copied: locks, files, objects of torch, numpy and C, script modules, and objects of `HOSTS`. Functions,
    methods and weak references that parts hold are bound to the copies. It reads the parts of the module and what they
    hold, and nothing else: no globals, no attributes of classes. Allocates the clones; no sync.

    Made after the first call, in which lazy layers build their weights.

    Args:
        module: The module.
        clones: Addresses of the storages to clone; by default those of all tensors that are no parameters.
        compares: If False, the copy only tells what the module holds, and not what changes later.

    Attributes:
        original: As given.
        module: The copy.
        random: The random numbers of its watched runs.
        is_watched: True while a run is watched for writes to what the copy shares.
        held: The tensors and modules that the original holds.
        shared: The tensors that the copy shares.
        cloned: Those that have a clone.
        values: Numbers, texts and tensors that it holds, by path.
        snapshot: What the module, and the objects that it holds, kept when the copy was made.
    """

    def __init__(self, module: nn.Module, clones: Collection[int] | None = None, compares: bool = True) -> None:
        self.original = module
        self.random = RandomStream()
        self.is_watched = False
        self.held: list[Held] = []
        self.shared: list[Tensor] = []
        self.values: dict[str, Any] = {}
        self._clones = clones
        self._compares = compares
        self._room = MOST_BYTES
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id comes again
        self._bound: list[Any] = []
        self.snapshot = Snapshot()
        self._own = Snapshot()
        self.cloned: list[Cloned] = []
        self._registered = set[int]()
        self._storages: dict[int, torch.UntypedStorage | None] = {}  # clones by address; `None` for shared ones
        self._memories: list[_Memory] = []
        self._tensors: list[Cloned] = []  # all, and what stands for them in the copy
        self._waiting: deque[Callable[[], None]] = deque()
        parameters = [*module.parameters()]
        self._on_gpu = any(one.is_cuda for one in parameters)
        for parameter in parameters:
            self._storages[address_of(parameter)] = None
        for path, part in module.named_modules():
            self._copy(part, path)
        self._finish()
        self.module: nn.Module = self._memo.get(id(module), module)

    def of(self, value: Any, path: str = "") -> Any:
        """Return a value, such as a function over parts of the module, bound to the copies."""
        bound = self._copy(value, path)
        self._finish()
        self._bound.append(bound)
        return bound

    def give(self, attributes: Mapping[str, Any]) -> None:
        """Give the copy other attributes than the original has, which is no change by a run."""
        if attributes:
            vars(self.module).update(attributes)
            self._own.take(vars(self.module), attributes)

    def changes(self) -> list[str]:
        """Return the path of everything in the shadow that differs from the original as it was. Syncs."""
        return [change.path for change in self.changed()]

    def changed(self) -> list[Changed]:
        """Return everything in the shadow that differs from the original as it was. Syncs."""
        written = [
            Changed(path, path, tensor, None, original)
            for path, original, tensor in self.cloned
            if not same_bits(original, tensor)
        ]
        return [*written, *self._own.changes()]

    def places(self) -> set[str]:
        """Return the paths of the attributes and containers in the shadow that hold something else by now."""
        return {change.place for change in self._own.changes()}

    def is_current(self, moving: Collection[str]) -> bool:
        """Return True if the copy does what a new one would: neither it nor the original has changed since. Syncs.

        Args:
            moving: Paths of attributes and containers whose changes change no output.
        """
        changes = chain(self.snapshot.changes(), self._own.changes())
        same = all(same_bits(original, tensor) for _, original, tensor in self.cloned)
        return same and all(change.place in moving for change in changes)

    @property
    def nbytes(self) -> int:
        """Bytes of the clones."""
        return sum(one.clone.nbytes for one in self.cloned)

    def own(self) -> set[int]:
        """Return the addresses of the tensors that the shadow, and what is bound to it, holds now, and no original."""
        now = {address_of(one.clone) for one in self.cloned}
        if self.places():
            walk = Shadow(self.module, (), compares=False)
            for bound in self._bound:
                walk.of(bound)
            now |= {address_of(one.value) for one in walk.held if isinstance(one.value, Tensor)}
        return now - {address_of(one.value) for one in self.held if isinstance(one.value, Tensor)}

    def registered(self, path: str) -> bool:
        """Return True for the path of a parameter or buffer."""
        return id(self.values.get(path)) in self._registered

    def _note(self, value: Any, own: Any) -> Any:
        self._memo[id(value)] = own
        self._kept.append(value)
        return own

    def _record(self, path: str, value: Any, own: Any, kind: type | None = None) -> None:
        if self._compares:
            self.snapshot.add(path, value, kind)
            self._own.add(path, own, kind)

    def _finish(self) -> None:
        while self._waiting:
            self._waiting.popleft()()

    def _copy(self, value: Any, path: str, place: Place | None = None) -> Any:
        """Return the copy of a value, which may be filled later; or the value itself if it is shared."""
        kind = type(value)  # an object may claim to be of another class, or raise when it is asked
        if kind in ATOMS or issubclass(kind, Tensor):
            self.values.setdefault(path, value)
        if kind in ATOMS:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if issubclass(kind, Tensor):
            self.held.append(Held(path, value, place))
            return self._note(value, self._copy_tensor(value, path))
        if issubclass(kind, nn.Module):
            return self._copy_part(value, path, place)
        if kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            own = [self._copy(one, f"{path}[{at}]") for at, one in enumerate(tuple.__iter__(value))]
            same = all(one is other for one, other in zip(own, tuple.__iter__(value), strict=True))
            return self._note(value, value if same else tuple.__new__(kind, own))
        if issubclass(kind, _CONTAINERS) and (own := self._copy_container(value, path)) is not ABSENT:
            return own
        if kind is frozenset:
            frozen = frozenset(self._copy(one, path) if issubclass(type(one), nn.Module) else one for one in value)
            return self._note(value, value if frozen == value else frozen)
        if kind is DeviceConstants:
            self.held += [Held(path, tensor) for tensor in value.tensors]
            self.shared += value.tensors
            return self._note(value, value)
        if (code := self._copy_code(value, path)) is not ABSENT:
            return code
        return self._copy_object(value, path) if _is_plain(kind) else self._copy_other(value, path)

    def _copy_part(self, part: nn.Module, path: str, place: Place | None) -> Any:
        kind = type(part)
        if issubclass(kind, torch.jit.ScriptModule | NotCopied):
            for name, tensor in (*part.named_parameters(path), *part.named_buffers(path)):
                self.held.append(Held(name, tensor))
                self.shared.append(tensor)
            return self._note(part, part)
        self.held.append(Held(path, part, place))
        own = self._note(part, object.__new__(kind))
        self._waiting.append(partial(self._fill_object, part, own, path))
        return own

    def _copy_object(self, value: Any, path: str) -> Any:
        kind = type(value)
        if not (hasattr(value, "__dict__") or any(vars(base).get("__slots__") for base in kind.__mro__)):
            return self._note(value, value)  # it can keep nothing, and others may compare it by identity
        own = self._note(value, SimpleNamespace() if kind is SimpleNamespace else object.__new__(kind))
        self._waiting.append(partial(self._fill_object, value, own, path))
        return own

    def _copy_other(self, value: Any, path: str) -> Any:
        """Return a copy of a value of C where its state can be copied; else the value."""
        kind, numpy = type(value), sys.modules.get("numpy")
        if kind is torch.Generator:
            return self._note(value, value.clone_state())
        if kind in (array, bytearray) or issubclass(kind, _OF_C) or (numpy and kind is numpy.ndarray):
            return self._note(value, self._copy_memory(value, path))
        own = value
        with suppress(TypeError):  # newer Pythons copy no iterators
            if kind in _COPYABLE:
                own = copy(value)
            elif kind is itertools.cycle or (numpy and kind in _generators_of(numpy)):
                own = deepcopy(value)  # a shallow copy turns the original
        return self._note(value, own)

    def _copy_memory(self, value: Any, path: str) -> Any:
        """Return a copy of numbers in memory, which copies of tensors share as their originals do."""
        kind = type(value)
        size = value.nbytes if hasattr(value, "nbytes") else memoryview(value).nbytes
        if size > min(self._room, MOST_BYTES // 8):
            return value
        self._room -= size
        base: Any = value.base if kind not in (array, bytearray) and not issubclass(kind, _OF_C) else None
        if type(base) is kind and base.flags.c_contiguous:  # a view of an array
            offset = _start_of(value) - _start_of(base)
            return kind(value.shape, value.dtype, self._copy(base, path), offset, value.strides)
        own = kind.from_buffer_copy(value) if issubclass(kind, _OF_C) else copy(value)
        if kind in (array, bytearray):
            self._record(path, value, own)
        with suppress(TypeError, ValueError, AttributeError, BufferError):  # empty, read-only, or of other than numbers
            memory = _Memory(_bytes_in(value), _bytes_in(own))
            self._memories.append(memory)
            if kind not in (array, bytearray):  # those may be given other memory
                self.cloned.append(Cloned(path, _numbers_in(value), _numbers_in(own)))
                self.snapshot.add(path, memory.original)
            for one in self._tensors:
                self._share(one, memory)
        return own

    def _share(self, one: Cloned, memory: _Memory) -> bool:
        """Let the copy of a tensor lie in the memory of a copied object, if the tensor lies in that of the object."""
        found = memory.of(one.original) if self._clones is None or address_of(one.original) in self._clones else None
        if found is not None:
            with torch.inference_mode(False), torch.no_grad():
                one.clone.set_(*found, one.original.shape, one.original.stride())
        return found is not None

    def _fill_object(self, value: Any, own: Any, path: str) -> None:
        start = f"{path}." if path else ""
        if (attributes := getattr(value, "__dict__", None)) is not None:
            is_part, mine = issubclass(type(value), nn.Module), self._note(attributes, own.__dict__)
            for name, one in list(attributes.items()):
                if is_part and name in REGISTRIES:
                    mine[name] = copy(one)
                    self._fill_registry(attributes, name, mine[name], start)
                else:
                    mine[name] = self._copy(one, f"{start}{name}", Place({"": attributes}, "", name))
            self._record(path, attributes, mine, type(value))
        if slots := dict(slots_of(value)):
            for name, one in slots.items():
                object.__setattr__(own, name, self._copy(one, f"{start}{name}"))
            if not issubclass(type(value), _CONTAINERS):
                self._record(path, value, own, type(value))

    def _fill_registry(self, owner: dict[str, Any], registry: str, own: dict[str, Any], start: str) -> None:
        for name, one in list(owner[registry].items()):
            own[name] = self._copy(one, f"{start}{name}", Place(owner, registry, name))
            if isinstance(one, Tensor):
                self._registered.add(id(one))
        self._record(start[:-1], owner[registry], own, nn.Module)

    def _copy_container(self, value: Any, path: str) -> Any:
        """Return a copy of a container with the attributes of one's own class; `ABSENT` if it cannot be copied."""
        kind = type(value)
        try:
            own = value.copy() if kind in _OF_PYTHON else copy(value)
        except Exception:  # of a class of one's own
            return ABSENT
        if type(own) is not kind:
            return ABSENT
        self._note(value, own)
        if getattr(value, "__dict__", None) or (kind not in _OF_PYTHON and hasattr(value, "__dict__")):
            self._waiting.append(partial(self._fill_object, value, own, path))
        if isinstance(own, defaultdict):
            own.default_factory = self._copy(own.default_factory, path)
        # Other classes than Python's own may lie about their size, or raise.
        entries = {} if kind in _OF_PYTHON and not own else entries_of(own)
        if not entries:
            self._record(path, value, own)
        elif len(entries) <= MOST_ENTRIES:
            self._waiting.append(partial(self._fill_container, value, own, path))
        return own

    def _fill_container(self, value: Any, own: Any, path: str) -> None:
        """Replace the entries of a container that was copied as it is."""
        if isinstance(own, dict):
            for key, one in entries_of(own).items():
                if issubclass(type(key), nn.Module):
                    del own[key]
                    key = self._copy(key, path)
                inside = f"{path}[{key!r}]" if type(key) in ATOMS else f"{path}[...]"
                own[key] = self._copy(one, inside, Place({"": value}, "", key))
        elif isinstance(own, list | deque):
            for at, one in entries_of(own).items():
                own[at] = self._copy(one, f"{path}[{at}]")
        elif isinstance(own, set):
            parts = [one for one in own if issubclass(type(one), nn.Module)]
            own.difference_update(parts)
            own.update(self._copy(one, path) for one in parts)
        self._record(path, value, own)

    def _copy_code(self, value: Any, path: str) -> Any:
        """Return a function, method or reference bound to copies; `ABSENT` for a value that is none."""
        kind = type(value)
        if kind is FunctionType:
            return self._copy_function(value, path)
        if kind is CellType:
            own = self._note(value, CellType())
            self._waiting.append(partial(self._fill_cell, value, own, path))
            return own
        if kind is MethodType:
            bound = MethodType(self._copy(value.__func__, path), self._copy(value.__self__, path))
            return self._note(value, bound)
        if kind is partial:
            function = self._copy(value.func, path)
            args = [self._copy(one, f"{path}.args[{at}]") for at, one in enumerate(value.args)]
            keywords = {name: self._copy(one, f"{path}.{name}") for name, one in value.keywords.items()}
            own = self._note(value, partial(function, *args, **keywords))
            vars(own).update({name: self._copy(one, f"{path}.{name}") for name, one in list(vars(value).items())})
            return own
        if kind is _lru_cache_wrapper:  # of an instance: what it has cached follows from the arguments
            wrapped = self._copy(value.__wrapped__, path)
            same = wrapped is value.__wrapped__
            return self._note(value, value if same else lru_cache(**value.cache_parameters())(wrapped))
        if kind is BuiltinFunctionType:
            owner = value.__self__
            own = self._copy(owner, path) if isinstance(owner, _CONTAINERS) else owner
            return self._note(value, value if own is owner else getattr(own, value.__name__))
        if kind in (weakref.ref, weakref.ProxyType, weakref.CallableProxyType):
            try:
                target = value() if kind is weakref.ref else value.__init__.__self__
            except ReferenceError:
                return self._note(value, value)
            own = self._copy(target, path) if issubclass(type(target), nn.Module) else target
            refer = weakref.ref if kind is weakref.ref else weakref.proxy
            return self._note(value, value if own is target else refer(own))
        if kind is threading.local:
            local = self._note(value, threading.local())
            self._waiting.append(partial(self._fill_object, value, local, path))
            return local
        return ABSENT

    def _copy_function(self, function: FunctionType, path: str) -> FunctionType:
        if function.__closure__ is None and not (function.__defaults__ or function.__kwdefaults__):
            return function
        names, start = function.__code__.co_freevars, f"{path}." if path else ""
        cells = tuple(
            self._copy(cell, f"{start}{n}") for n, cell in zip(names, function.__closure__ or (), strict=True)
        )
        own = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
        own.__qualname__ = function.__qualname__
        own.__module__, own.__doc__ = function.__module__, function.__doc__
        self._note(function, own)
        self._waiting.append(partial(self._fill_function, function, own, path))
        return own

    def _fill_function(self, function: FunctionType, own: FunctionType, path: str) -> None:
        own.__defaults__ = self._copy(function.__defaults__, f"{path}.__defaults__")
        own.__kwdefaults__ = self._copy(function.__kwdefaults__, f"{path}.__kwdefaults__")
        for name, one in list(vars(function).items()):
            setattr(own, name, self._copy(one, f"{path}.{name}"))

    def _fill_cell(self, cell: CellType, own: CellType, path: str) -> None:
        with suppress(ValueError):  # empty
            own.cell_contents = self._copy(cell.cell_contents, path)
            self._record(path, cell, own)

    def _copy_tensor(self, tensor: Tensor, path: str) -> Tensor:
        """Return a clone, which is a view of the clone of another tensor if the original is; or the tensor itself."""
        if type(tensor) is nn.Parameter and tensor.layout is torch.strided:
            self.shared.append(tensor)
            with torch.inference_mode(tensor.is_inference()):
                alias = nn.Parameter(tensor.detach(), tensor.requires_grad)  # its form may change by itself
            vars(alias).update(vars(tensor))
            self._tensors.append(Cloned(path, tensor, alias))
            any(self._share(self._tensors[-1], memory) for memory in self._memories)
            return alias
        if not self._may_clone(tensor):
            self.shared.append(tensor)
            return tensor
        if not tensor.numel():  # it may be resized
            clone = tensor.detach().clone()
            self.cloned.append(Cloned(path, tensor, clone))
            return clone
        address = address_of(tensor)
        if address not in self._storages:
            size = tensor.untyped_storage().nbytes()
            clones = size <= min(self._room, MOST_BYTES // 8) if self._clones is None else address in self._clones
            self._room -= size if clones else 0
            with torch.inference_mode(False):
                self._storages[address] = tensor.untyped_storage().clone() if clones else None
        storage = self._storages[address]
        if storage is None:
            self.shared.append(tensor)
            return tensor
        with torch.inference_mode(False), torch.no_grad():
            clone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            clone.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        clone.requires_grad_(tensor.requires_grad)
        vars(clone).update(vars(tensor))
        self.cloned.append(Cloned(path, tensor, clone))
        self._tensors.append(self.cloned[-1])
        any(self._share(self._tensors[-1], memory) for memory in self._memories)
        return clone

    def _may_clone(self, tensor: Tensor) -> bool:
        """Return False for tensors without plain memory of their own, and those of the host beside a GPU."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            return False
        return not (
            tensor.is_conj()
            or tensor.is_neg()
            or (self._on_gpu and not tensor.is_cuda)
            or (tensor.numel() and not address_of(tensor))
        )


def held_by(module: nn.Module, beside: Mapping[str, Any]) -> list[Held]:
    """Return the tensors and modules that a module, and functions and objects that run beside it, by name, hold."""
    walk = Shadow(module, (), compares=False)
    for name, value in beside.items():
        walk.of(value, name)
    return walk.held


def address_of(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor, or of its local shard; 0 if it has no storage of its own."""
    if isinstance(tensor, FakeTensor):  # torch tries the sharding of an operator on such
        return 0
    try:
        return local_tensor(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, lazy, or made of other tensors
        return 0


def describe(tensor: Tensor) -> str:
    """Return the dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if tensors are equal bit for bit. Syncs with the device."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.stride() != (1,):  # of one entry
        plain = torch.empty_like(plain, memory_format=torch.contiguous_format).copy_(plain)
    return plain.view(torch.uint8)


def _is_plain(kind: type) -> bool:
    """Return True for a class of Python objects that are what their attributes are."""
    package = str(kind.__module__).partition(".")[0]
    if any(f"{kind.__module__}.".startswith(f"{host}.") for host in HOSTS):
        return False
    if kind is SimpleNamespace or package == "collections" or str(kind.__module__).startswith(DECLARATIONS):
        return True
    if package in _LIBRARIES or package in sys.stdlib_module_names or package == "builtins":
        return False
    own = all(getattr(kind, name) is getattr(object, name) for name in _OF_PLAIN)
    return own and not hasattr(kind, "__del__")


def _start_of(array: Any) -> int:
    """Return the address of an array of numpy."""
    start: int = array.__array_interface__["data"][0]
    return start


def _bytes_in(value: Any) -> Tensor:
    """Return the memory of an object of the host, writable as it is.

    Raises:
        TypeError, ValueError: It has none, or it can only be read.
    """
    if memoryview(value).readonly:
        raise ValueError("read-only")
    return torch.frombuffer(value, dtype=torch.uint8)


def _numbers_in(value: Any) -> Tensor:
    """Return the memory of an array as numbers, where torch has their dtype; as bytes of other objects."""
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError):
        return _bytes_in(value)


def _generators_of(numpy: Any) -> tuple[type, ...]:
    return numpy.random.Generator, numpy.random.RandomState
