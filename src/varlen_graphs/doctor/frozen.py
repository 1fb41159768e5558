"""What a graph would freeze: numbers and branches that are not the same for all layouts of as many rows."""

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

from varlen_graphs.doctor.branches import deciding_line
from varlen_graphs.doctor.examples import Example, Number
from varlen_graphs.doctor.runs import Operation, Run, Sighting, Site, Value
from varlen_graphs.watch.lines import Line


class Observed(NamedTuple):
    """A call, and what its run did.

    Attributes:
        name: What messages call it.
        run: Of the module.
        sizes: Dimensions of the tensors of the call, by a name of each.
        numbers: Its arguments that are numbers, by name.
    """

    name: str
    run: Run
    sizes: dict[str, int]
    numbers: dict[str, Number]

    @classmethod
    def of(cls, name: str, run: Run, example: Example) -> "Observed":
        """The run of an example."""
        return cls(name, run, example.sizes(), example.numbers())


def frozen_values(calls: Sequence[Observed]) -> list[Sighting]:
    """Numbers, and tensors of the module, given to operations that are others in another call.

    A number that follows from sizes is none of them: those of a call are the budget's, and others were named where they
    came to be. It follows if in all calls it is the same multiple of one size, or one more, or one less: a size of the
    call, of the tensors at hand, or one that Python had read from another tensor.
    """
    return [
        Sighting("frozen value", what, site.lines[0], operations[0].module)
        for site, operations, alike in _side_by_side(calls)
        if (what := _changed_values(site, operations, alike))
    ]


def padded_sizes(calls: Sequence[Observed]) -> list[Sighting]:
    """Numbers that operations compute with, and that are others in another call, whatever its rows.

    They follow from sizes, unless an argument gave them, or they were read from a tensor.
    """
    return [
        Sighting("padded size", "; ".join(changed), site.lines[0], operations[0].module)
        for site, operations, alike in _side_by_side(calls)
        if (changed := list(_changed_scalars(site, operations, alike)))
    ]


def frozen_branches(calls: Sequence[Observed]) -> list[Sighting]:
    """Loops and branches under which other functions of torch were called, or not as often, in another call.

    Where none shows, an early return say, it is the first line of its function that ran so.
    """
    changed: list[Site] = []
    steady: list[Site] = []
    for site in dict.fromkeys(site for call in calls for site in call.run.functions):
        as_often = len({_count(call, site) for call in calls}) == 1
        (steady if as_often else changed).append(site)
    stacks = {site.lines[at:] for site in steady for at in range(len(site.lines))}
    decided: dict[Line, list[Site]] = {}
    undecided: dict[tuple[str, str], list[tuple[Line, Site]]] = {}
    for site in changed:
        # The outermost line of the stack under which everything changed is decided over, and not what it calls.
        line = next((line for at, line in _outside_in(site) if site.lines[at:] not in stacks), site.lines[0])
        numbers = {own.number for other in steady for own in other.lines if own.file == line.file}
        if deciding := deciding_line(line, numbers):
            decided.setdefault(deciding, []).append(site)
        else:
            undecided.setdefault((line.file, line.function), []).append((line, site))
    for line in [line for line in decided if (line.file, line.function) in undecided]:
        own = undecided[line.file, line.function]
        if min(own)[0].number < line.number:  # of what ran after an early return, its branches decide nothing
            own += [(line, site) for site in decided.pop(line)]
    decided |= {min(line for line, _ in own): [site for _, site in own] for own in undecided.values()}
    sightings = []
    for line, sites in decided.items():
        counts = [sum(_count(call, site) for site in sites) for call in calls]
        ran = [f"{n} operation{'s' * (n != 1)} in {call.name}" for n, call in zip(counts, calls, strict=True)]
        modules = {path for call in calls for site in sites for path in call.run.functions.get(site, ())}
        what = f"it ran {', '.join(ran)}"
        sightings += [Sighting("frozen branch", what, line, module) for module in _outermost(modules)]
    return sightings


def _side_by_side(
    calls: Sequence[Observed],
) -> Iterator[tuple[Site, tuple[Operation, ...], Sequence[Observed]]]:
    """One operation of each call, by calls in which it ran as often."""
    for site in dict.fromkeys(site for call in calls for site in call.run.operations):
        for alike in _ran_as_often(site, calls):
            for operations in zip(*(call.run.operations[site] for call in alike), strict=True):
                yield site, operations, alike


def _ran_as_often(site: Site, calls: Sequence[Observed]) -> list[list[Observed]]:
    """Calls by how often an operator ran in them."""
    groups: dict[int, list[Observed]] = {}
    for call in calls:
        groups.setdefault(len(call.run.operations.get(site, ())), []).append(call)
    return [alike for count, alike in groups.items() if count and len(alike) > 1]


def _changed_values(site: Site, operations: Sequence[Operation], calls: Sequence[Observed]) -> str:
    """What is not the same in one operation of each call, in words."""
    changed = []
    for name in dict.fromkeys(name for operation in operations for name in operation.values):
        values = [operation.values.get(name) for operation in operations]
        if not all(_same(value, values[0]) for value in values) and not _explained(values, operations, calls):
            changed.append(f"{_told(name, values, site, calls)}{_origin(values, site, calls)}")
    return "; ".join(changed)


def _changed_scalars(site: Site, operations: Sequence[Operation], calls: Sequence[Observed]) -> Iterator[str]:
    for name in operations[0].scalars:
        values = [operation.values.get(name) for operation in operations]
        numbers = all(isinstance(value, int | float | complex) for value in values)
        if numbers and not all(_same(value, values[0]) for value in values) and not _origin(values, site, calls):
            yield _told(name, values, site, calls)


def _told(name: str, values: Sequence[Value | None], site: Site, calls: Sequence[Observed]) -> str:
    pairs = [f"{value} in {call.name}" for value, call in zip(values, calls, strict=True)]
    return f"{name} of {site.name} is {', '.join(pairs)}"


def _outermost(paths: Set[str]) -> list[str]:
    """Those of paths of submodules that are inside of no other."""
    return sorted(path for path in paths if not any(_is_inside(path, other) for other in paths))


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _outside_in(site: Site) -> list[tuple[int, Line]]:
    return list(enumerate(site.lines))[::-1]


def _count(call: Observed, site: Site) -> int:
    return len(call.run.functions.get(site, ()))


def _same(value: Value | None, other: Value | None) -> bool:
    """Whether two values are equal; so is NaN to NaN."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return value == other or (value != value and other != other)


def _explained(values: Sequence[Value | None], operations: Sequence[Operation], calls: Sequence[Observed]) -> bool:
    """Whether all that differs in a value follows from sizes."""
    known = [
        operation.sizes | call.sizes | dict(call.run.sizes[: operation.sizes_read])
        for operation, call in zip(operations, calls, strict=True)
    ]
    slots = [[sizes[name] for sizes in known] for name in known[0] if all(name in sizes for sizes in known)]
    lists = [value if isinstance(value, tuple) else (value,) for value in values]
    if len({len(own) for own in lists}) > 1:
        return False
    for column in zip(*lists, strict=True):
        if not all(_same(value, column[0]) for value in column) and not any(_follows(column, slot) for slot in slots):
            return False
    return True


def _follows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    if not all(type(value) is int for value in values):
        return False
    multiple = all(value * sizes[0] == values[0] * size for value, size in zip(values, sizes, strict=True))
    apart = {value - size for value, size in zip(values, sizes, strict=True)}
    return (multiple and sizes[0] > 0) or apart in ({1}, {-1})


def _origin(values: Sequence[Value | None], site: Site, calls: Sequence[Observed]) -> str:
    """Where a number comes from, as far as that shows: an argument, or a line that read it from a tensor."""
    for name in calls[0].numbers:
        if all(_same(call.numbers.get(name), value) for call, value in zip(calls, values, strict=True)):
            return f", the argument {name!r}"
    here = site.lines[0]
    for line in sorted(calls[0].run.reads, key=lambda line: (line.file, line.function) != (here.file, here.function)):
        read = all(_read(value, call.run.reads.get(line, set())) for call, value in zip(calls, values, strict=True))
        if read and line != here:
            return f", read from a tensor at {line.file}:{line.number}"
    return ""


def _read(value: Value | None, numbers: set[Number]) -> bool:
    return set(value if isinstance(value, tuple) else (value,)) <= numbers
