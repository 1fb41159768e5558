"""Sources of the tensors of a run: the operator that made each of them, or its name."""

import weakref
from collections.abc import Set
from typing import NamedTuple

import torch
from torch import Tensor

from varlen_graphs.doctor.run_record import CallSite

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]


class Result(NamedTuple):
    """A result of an operator."""

    site: CallSite
    call: int  # of this operator at this place, from 0
    at: int  # among its results
    function: CallSite  # the torch function that called the operator
    turn: int  # of this function at this place, from 0

    def __str__(self) -> str:
        line = self.site.lines[0]
        call = f" (its call {self.call + 1})" if self.call else ""
        return f"result {self.at} of {self.site.name}{call} at line {line.number}"

    @property
    def place(self) -> tuple[CallSite, int, int]:
        """Place of the result: torch functions choose their operators by the form of their arguments."""
        return self.function, self.turn, self.at


Source = str | Result
"""Name of a tensor that exists before the run, or the result of an operator."""


class Sources:
    """Sources of the tensors of one run, by storage and place in it.

    A view may lie where another tensor lies, and has several sources then.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], dict[Geometry, set[Source]]]] = {}

    def add(self, tensor: Tensor, source: Source) -> None:
        """Add a source of a tensor."""
        places = self._places(tensor)
        if places is None:
            places = {}
            self._storages[storage_key(tensor)] = weakref.ref(tensor.untyped_storage()), places
        places.setdefault(_geometry(tensor), set()).add(source)

    def of(self, tensor: Tensor) -> Set[Source]:
        """Return the possible sources of a tensor."""
        return frozenset((self._places(tensor) or {}).get(_geometry(tensor), ()))

    def _places(self, tensor: Tensor) -> dict[Geometry, set[Source]] | None:
        storage, places = self._storages.get(storage_key(tensor), (None, None))
        return places if storage is not None and storage() is not None else None  # another had this key before


def storage_key(tensor: Tensor) -> int:
    """Return a key of the tensor's storage, unique among live storages."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _geometry(tensor: Tensor) -> Geometry:
    if tensor.is_nested:
        return 0, (), ()
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
