"""Where tensors come from in a run: the operator that made each of them, or its name."""

from collections.abc import Set
from typing import NamedTuple

from torch import Tensor

from varlen_graphs.doctor.run_record import CallSite

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]


class Result(NamedTuple):
    """A result of an operator."""

    site: CallSite
    call: int  # of this operator at this place, from 0
    at: int  # among its results

    def __str__(self) -> str:
        line = self.site.lines[0]
        call = f" (its call {self.call + 1})" if self.call else ""
        return f"result {self.at} of {self.site.name}{call} at line {line.number}"


Source = str | Result
"""Name of a tensor that exists before the run, or the result of an operator."""


class Sources:
    """Sources of the tensors of one run, by storage and place in it.

    A view may lie where another tensor lies, and has several sources then.
    """

    def __init__(self) -> None:
        self._places: dict[int, dict[Geometry, set[Source]]] = {}

    def add(self, tensor: Tensor, source: Source, fresh: bool) -> None:
        """Add the source of a tensor; `fresh` means that it begins a new storage."""
        key = storage_key(tensor)
        if fresh:
            self._places[key] = {}
        self._places.setdefault(key, {}).setdefault(_geometry(tensor), set()).add(source)

    def of(self, tensor: Tensor) -> Set[Source]:
        """Return the possible sources of a tensor."""
        return frozenset(self._places.get(storage_key(tensor), {}).get(_geometry(tensor), ()))


def storage_key(tensor: Tensor) -> int:
    """Return a key of the tensor's storage, unique among live storages."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _geometry(tensor: Tensor) -> Geometry:
    if tensor.is_nested:
        return 0, (), ()
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
