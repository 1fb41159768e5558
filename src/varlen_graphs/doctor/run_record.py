"""Record of one run of a module."""

import weakref
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from varlen_graphs.doctor.example_call import Number
from varlen_graphs.torch_dispatch.lines import UNKNOWN_LINE, Line

Value = Number | tuple[Number, ...]


class Occurrence(NamedTuple):
    """One occurrence of a problem; occurrences of one line are merged into a `Finding`."""

    kind: str
    what: str
    line: Line  # innermost line of user code
    module: str  # path of the submodule that was running


class CallSite(NamedTuple):
    """Place of a call: lines of user code, innermost first, and the name of the operator or function."""

    lines: tuple[Line, ...]
    name: str


class OperatorCall(NamedTuple):
    """One operator call. The first four fields are those of `Arguments`."""

    values: dict[str, Value]
    sizes: dict[str, int]
    sources: dict[str, Set[Any]]
    shapes: dict[str, tuple[int, ...]]
    sizes_read: int  # number of sizes that Python had read before, in this run
    module: str
    scalars: frozenset[str]  # names of the values used in arithmetic
    turn: int  # number of the call of the torch function around it, at this place


class Allocation(NamedTuple):
    """Memory that a run allocated."""

    storage: weakref.ref[torch.UntypedStorage]
    line: Line
    module: str
    form: str  # dtype and shape, for messages
    from_data: bool  # computed from the contents of the call's tensors


@dataclass
class RunRecord:
    """Everything recorded about one run."""

    occurrences: list[Occurrence] = field(default_factory=list)
    operations: dict[CallSite, list[OperatorCall]] = field(default_factory=dict)  # on the device, in order
    functions: dict[CallSite, list[str]] = field(default_factory=dict)  # paths of the submodules that called them
    sizes: list[tuple[str, int]] = field(default_factory=list)  # read by Python of the module, with names of places
    reads: dict[Line, set[Number]] = field(default_factory=dict)  # numbers that the host read from device tensors
    outputs: dict[str, Set[Any]] = field(default_factory=dict)  # possible sources of the tensors it returned
    turns: dict[Line, int] = field(default_factory=dict)  # of loops over tensors
    returned_at: Line = UNKNOWN_LINE
    error: Occurrence | None = None
    used: set[str] = field(default_factory=set)  # names of the module's own tensors that operators took
    kept: list[Allocation] = field(default_factory=list)  # still alive after the run, with its output dropped
    places: dict[int, tuple[Line, str]] = field(default_factory=dict)  # where living tensors were made, by storage key
