"""Memory that a run allocates, and the tensors that exist before it."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from varlen_graphs.doctor.run_record import Allocation
from varlen_graphs.doctor.sources import storage_key
from varlen_graphs.torch_dispatch.lines import Line
from varlen_graphs.torch_dispatch.rules import has_storage


class Owner(NamedTuple):
    """A tensor that exists before a run: its name, the kind of finding if it is written, and if a list holds it."""

    kind: str
    name: str
    in_list: bool = False


Owners = dict[int, Owner]
"""Tensors that exist before a run, by `storage_key`."""

UNKNOWN = Owner("", "")


class Allocations:
    """Memory that one run allocated, by `storage_key`.

    Args:
        owners: The tensors that exist before the run.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._made: dict[int, Allocation] = {}
        self._made_on_host: dict[int, tuple[Line, str]] = {}
        self._unexamined: set[int] = set()
        self._from_data: set[int] = set()  # storages with results computed from contents of the call's tensors

    def __contains__(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._made or key in self._unexamined

    def add(self, tensor: Tensor, line: Line, path: str) -> None:
        """Add a new tensor, made at a line by the submodule at a path."""
        form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        key = storage_key(tensor)
        storage = weakref.ref(tensor.untyped_storage())
        self._made[key] = Allocation(storage, line, path, form, key in self._from_data)

    def add_unexamined(self, results: Sequence[Any]) -> None:
        """Add results that the module may write to, and that count neither as kept nor as state."""
        for own in results:
            if isinstance(own, Tensor) and has_storage(own):
                self._unexamined.add(storage_key(own))
                self.drop(own)

    def drop(self, tensor: Tensor) -> None:
        """Drop a tensor, so that it does not count as kept."""
        self._made.pop(storage_key(tensor), None)

    def add_on_host(self, tensor: Tensor, line: Line, path: str) -> None:
        """Add a tensor of the host, made at a line by the submodule at a path. It does not count as kept."""
        self.drop(tensor)
        self._made_on_host.setdefault(storage_key(tensor), (line, path))

    def places(self) -> dict[int, tuple[Line, str]]:
        """Return where living tensors were made, by `storage_key`: the line, and the path of the submodule."""
        living = {key: (made.line, made.module) for key, made in self._made.items() if made.storage() is not None}
        return self._made_on_host | living

    def alive(self) -> list[Allocation]:
        """Return the allocations that are still alive."""
        return [made for made in self._made.values() if made.storage() is not None]

    def follow_data(self, func: Any, inputs: Sequence[Tensor], result: Tensor) -> None:
        """Note whether a result is computed from the contents of the call's tensors, and not from their shapes."""
        name = str(func)
        from_shape = "_like" in name or ".new_" in name
        keys = {storage_key(tensor) for tensor in inputs}
        given = any(self._owners.get(key, UNKNOWN).kind == "input written" for key in keys)
        if not from_shape and (given or keys & self._from_data):
            self._from_data.add(storage_key(result))
        elif storage_key(result) not in keys:
            self._from_data.discard(storage_key(result))
