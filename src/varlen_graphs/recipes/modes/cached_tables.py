"""Host tensors that a tower keeps in plain attributes and copies to its device in each call: constants of graphs."""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varlen_graphs.shadows.constants import DeviceConstants
from varlen_graphs.torch_dispatch.uploads import MOVES


class CachedTable(NamedTuple):
    """Host tensor in a plain attribute, and how often it had been written when it was found."""

    path: str
    holder: dict[str, Any]
    name: str
    tensor: Tensor
    version: int

    def is_unchanged(self) -> bool:
        """Return True if the attribute holds this tensor, and nothing has written to it."""
        return self.holder.get(self.name) is self.tensor and self.tensor._version == self.version


def cached_tables(tower: nn.Module, device: torch.device) -> Iterator[CachedTable]:
    """Yield the host tensors that a tower on another device keeps in plain attributes.

    Registered buffers move with their module, and are none of these.
    """
    for prefix, part in tower.named_modules() if device.type != "cpu" else ():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.device.type == "cpu" and not value.is_inference():
                path = f"{prefix}.{name}" if prefix else name
                yield CachedTable(path, vars(part), name, value, value._version)


def reads_copies(tables: list[CachedTable], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a tower as `run` is, in which tables are copied to the device before the first capture."""
    # A list of its own: the search for the owners of what graphs read finds the copies in it.
    copies = [DeviceConstants(partial(_storage_of, table.tensor)) for table in tables]

    def function(tower: nn.Module, **arguments: Any) -> Any:
        device = next(tower.parameters()).device
        with _ReadsCopies({_key(t.tensor): copy.on(device) for t, copy in zip(tables, copies, strict=True)}):
            return run(tower, **arguments)

    function.__signature__ = signature(run)  # type: ignore[attr-defined]
    return function


def why_changed(tables: list[CachedTable], tower: nn.Module) -> str | None:
    """Return why calls must run eager: a table is no longer the one that graphs have a copy of."""
    changed = [table.path for table in tables if not table.is_unchanged()]
    return f"{changed[0]} was changed after it was copied to the device; wrap the model again" if changed else None


class _ReadsCopies(TorchFunctionMode):
    """Function mode under which tables, and views of them, are on the device already.

    Args:
        copies: Copies of their storages, by the storage and the dtype.
    """

    def __init__(self, copies: dict[tuple[int, torch.dtype], Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function."""
        if func in MOVES and args[0].device.type == "cpu" and (copy := self._copies.get(_key(args[0]))) is not None:
            args = (copy.as_strided(args[0].shape, args[0].stride(), args[0].storage_offset()), *args[1:])
        return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage()._cdata, tensor.dtype


def _storage_of(tensor: Tensor) -> Tensor:
    """Return a copy of the storage of a tensor."""
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(tensor.untyped_storage()).clone()
