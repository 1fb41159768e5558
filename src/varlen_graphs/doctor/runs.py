"""What a run of a module did, as far as the doctor asks."""

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from varlen_graphs.doctor.examples import Number
from varlen_graphs.watch.lines import Line

Value = Number | tuple[Number, ...]


class Sighting(NamedTuple):
    """Something that was seen once.

    Attributes:
        kind: What sort of thing it is.
        what: What was done, in words.
        line: The innermost of the user's lines that did it.
        module: The path of the submodule that was running.
    """

    kind: str
    what: str
    line: Line
    module: str


class Site(NamedTuple):
    """Where something is called: the user's lines, the innermost first, and the name of the operator or function."""

    lines: tuple[Line, ...]
    name: str


class Operation(NamedTuple):
    """What one operation was given, but for what is in tensors on the device.

    Attributes:
        values: Numbers, strings and lists of them, by the name of the argument; those of host scalars, too. Of the
            module's own tensors it is their name.
        sizes: Dimensions and numbers of elements of its tensors, and of those of the function of torch that it is part
            of, by a name of each.
        sizes_read: How many sizes of the run had been read before.
        module: The path of the submodule that was running.
        scalars: Which values are numbers to compute with, as `scalars_of` has it.
    """

    values: dict[str, Value]
    sizes: dict[str, int]
    sizes_read: int
    module: str
    scalars: frozenset[str]


class Made(NamedTuple):
    """Memory that the run allocated."""

    storage: weakref.ref[torch.UntypedStorage]
    line: Line
    module: str
    form: str


@dataclass
class Run:
    """What a run did.

    Attributes:
        sightings: What stands in the way or is worth knowing.
        operations: What ran on the device, in order, by where it comes from.
        functions: Paths of the submodules that called a function of torch, by where, if operations came of it.
        sizes: Sizes of tensors that the module's Python read, in order, with a name of the place.
        reads: Numbers that the host read from tensors of the device, by line.
        error: What ended the run, if it raised.
        used: The module's own tensors that operations were given, by name.
        kept: What was allocated, and is still alive after the run and its output are gone.
    """

    sightings: list[Sighting] = field(default_factory=list)
    operations: dict[Site, list[Operation]] = field(default_factory=dict)
    functions: dict[Site, list[str]] = field(default_factory=dict)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    reads: dict[Line, set[Number]] = field(default_factory=dict)
    error: Sighting | None = None
    used: set[str] = field(default_factory=set)
    kept: list[Made] = field(default_factory=list)
