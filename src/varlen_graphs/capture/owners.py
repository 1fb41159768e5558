"""Where a module keeps its tensors."""

from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DEPTH = 4
"""How many containers, objects or closures deep attributes are looked into."""

REGISTERED = ("_parameters", "_buffers", "_modules")
LEAVES = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a module reaches, by their paths from it.

    Parameters and buffers, and what lies in plain attributes: in lists, dicts and objects there, and in the closures of
    functions.
    """
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        if isinstance(owner, torch.jit.ScriptModule):
            continue
        start = f"{prefix}." if prefix else ""
        plain = [(name, value) for name, value in vars(owner).items() if name not in REGISTERED]
        for name, value in (*owner._parameters.items(), *owner._buffers.items(), *plain):
            yield from _within(f"{start}{name}", value, DEPTH, seen)


def describe(tensor: Tensor) -> str:
    """The dtype and shape of a tensor, as messages give them."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _within(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value that was not seen yet."""
    if isinstance(value, LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
    if depth:
        for at, part in _parts(value):
            yield from _within(f"{path}{at}", part, depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value consists of, and how a path goes on to it."""
    if isinstance(value, Mapping):
        yield from [(f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        yield from [(f"[{at}]", part) for at, part in enumerate(value)]
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from [(f".{name}", part) for name, cell in cells for part in _content(cell)]
    elif not isinstance(value, type | ModuleType | nn.Module) and not _is_ours(value):
        yield from [(f".{name}", part) for name, part in (getattr(value, "__dict__", None) or {}).items()]


def _content(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not filled yet
        return ()


def _is_ours(value: Any) -> bool:
    """Whether this is an encoder in the place of a forward, or part of one."""
    return type(value).__module__.startswith("varlen_graphs.")


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
