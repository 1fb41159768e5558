"""Record of one run of a module."""

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from varlen_graphs.doctor.example_call import Number
from varlen_graphs.watch.lines import Line

Value = Number | tuple[Number, ...]


class Occurrence(NamedTuple):
    """One occurrence of a problem; occurrences of one line are merged into a `Finding`.

    Attributes:
        kind: Kind of finding.
        what: Description of what the line did.
        line: Innermost line of user code.
        module: Path of the submodule that was running.
    """

    kind: str
    what: str
    line: Line
    module: str


class CallSite(NamedTuple):
    """Place of a call: lines of user code, innermost first, and the name of the operator or function."""

    lines: tuple[Line, ...]
    name: str


class OperatorCall(NamedTuple):
    """Arguments of one operator call, except for the contents of device tensors.

    Attributes:
        values: Numbers, strings and lists of them by argument name, including host scalars. A tensor of the module is
            represented by its name.
        sizes: Dimensions and element counts, by name, of its tensors and of those of the torch function around it.
        sizes_read: Number of sizes that Python had read before, in this run.
        module: Path of the submodule that was running.
        scalars: Names of the values used in arithmetic; see `scalars_of`.
    """

    values: dict[str, Value]
    sizes: dict[str, int]
    sizes_read: int
    module: str
    scalars: frozenset[str]


class Allocation(NamedTuple):
    """Memory that a run allocated.

    Attributes:
        storage: Reference that does not keep it alive.
        line: Innermost line of user code.
        module: Path of the submodule that was running.
        form: Dtype and shape, for messages.
    """

    storage: weakref.ref[torch.UntypedStorage]
    line: Line
    module: str
    form: str


@dataclass
class RunRecord:
    """Everything recorded about one run.

    Attributes:
        occurrences: Problems, and what is worth knowing.
        operations: Operator calls on the device, in order, by call site.
        functions: Paths of the submodules that called a torch function, by call site, if it ran operators.
        sizes: Tensor sizes that Python of the module read, in order, each with a name of its place.
        reads: Numbers that the host read from device tensors, by line.
        error: The error that ended the run, if any.
        used: Names of the module's own tensors that operators took.
        kept: Allocations still alive after the run, with its output dropped.
    """

    occurrences: list[Occurrence] = field(default_factory=list)
    operations: dict[CallSite, list[OperatorCall]] = field(default_factory=dict)
    functions: dict[CallSite, list[str]] = field(default_factory=dict)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    reads: dict[Line, set[Number]] = field(default_factory=dict)
    error: Occurrence | None = None
    used: set[str] = field(default_factory=set)
    kept: list[Allocation] = field(default_factory=list)
