"""Search for values and branches that a graph would freeze: those that differ between calls with equally many rows."""

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

from varlen_graphs.doctor.example_call import ExampleCall, Number
from varlen_graphs.doctor.run_record import CallSite, Occurrence, OperatorCall, RunRecord, Value
from varlen_graphs.doctor.sources import Result, Source

READ = ", read from a tensor at"
"""Words about a number whose origin is known."""


class ObservedCall(NamedTuple):
    """A call, and the record of its run."""

    name: str  # in messages
    run: RunRecord
    sizes: dict[str, int]  # dimensions of the call's tensors, by name
    numbers: dict[str, Number]  # the call's numeric arguments, by name

    @classmethod
    def of(cls, name: str, run: RunRecord, example: ExampleCall) -> "ObservedCall":
        """Join an example call and the record of its run."""
        return cls(name, run, example.sizes(), example.numbers())


def frozen_values(calls: Sequence[ObservedCall]) -> list[Occurrence]:
    """Find numbers and module tensors passed to operators that differ between calls, and do not follow from sizes."""
    # Sizes of a call become those of the budget, and other sizes are reported where they first occur. A number follows
    # from a size if it is the same multiple of it in all calls, or one more or one less than it. The size may be one of
    # the call, of the operator's tensors, or any that Python read before.
    return [
        Occurrence("frozen value", what, site.lines[0], operations[0].module)
        for site, operations, alike in _side_by_side(calls)
        if (what := _changed_values(site, operations, alike))
    ] + list(_changed_outputs(calls))


def padded_sizes(calls: Sequence[ObservedCall]) -> list[Occurrence]:
    """Find numbers used in arithmetic that differ between calls, and are no arguments nor read from a tensor."""
    return [
        Occurrence("padded size", "; ".join(changed), site.lines[0], operations[0].module)
        for site, operations, alike in _side_by_side(calls)
        if (changed := list(_changed_scalars(site, operations, alike)))
    ]


def _side_by_side(
    calls: Sequence[ObservedCall],
) -> Iterator[tuple[CallSite, tuple[OperatorCall, ...], Sequence[ObservedCall]]]:
    """Yield matching operator calls, one of each call, for calls in which the operator ran equally often.

    Torch functions choose their operators by the form of their arguments: only the same call of one is compared.
    """
    for site in dict.fromkeys(site for call in calls for site in call.run.operations):
        for alike in _group_by_count(site, calls):
            for operations in zip(*(call.run.operations[site] for call in alike), strict=True):
                if len({operation.turn for operation in operations}) == 1:
                    yield site, operations, alike


def _group_by_count(site: CallSite, calls: Sequence[ObservedCall]) -> list[list[ObservedCall]]:
    """Group calls by the number of times an operator ran; groups of one are dropped."""
    groups: dict[int, list[ObservedCall]] = {}
    for call in calls:
        groups.setdefault(len(call.run.operations.get(site, ())), []).append(call)
    return [alike for count, alike in groups.items() if count and len(alike) > 1]


def _changed_values(site: CallSite, operations: Sequence[OperatorCall], calls: Sequence[ObservedCall]) -> str:
    """Describe the values that differ between matching operator calls."""
    changed = []
    for name in dict.fromkeys(name for operation in operations for name in operation.values):
        values = [operation.values.get(name) for operation in operations]
        if not all(_equal(value, values[0]) for value in values) and not _follows_from_sizes(values, operations, calls):
            changed.append(f"{_describe(name, values, site, calls)}{_origin(values, site, calls)}")
    for name in operations[0].shapes:
        shapes = [operation.shapes.get(name) for operation in operations]
        if not all(shape == shapes[0] for shape in shapes):
            changed.append(_describe(f"the shape of {name}", shapes, site, calls))
    sources = {name: [own.sources.get(name, frozenset()) for own in operations] for name in operations[0].sources}
    chosen = {name: _chosen(own, calls) for name, own in sources.items()}
    return "; ".join([*changed, *(_describe(name, own, site, calls) for name, own in chosen.items() if own)])


def _changed_outputs(calls: Sequence[ObservedCall]) -> Iterator[Occurrence]:
    for name in calls[0].run.outputs if len(calls) > 1 else ():
        if chosen := _chosen([call.run.outputs.get(name, frozenset()) for call in calls], calls):
            pairs = [f"{source} in {call.name}" for source, call in zip(chosen, calls, strict=True)]
            yield Occurrence("frozen value", f"the output{name} is {', '.join(pairs)}", calls[0].run.returned_at, "")


def _chosen(sources: Sequence[Set[Source]], calls: Sequence[ObservedCall]) -> list[Source] | None:
    """Return a source for each call if the layout chooses among tensors that all calls have."""
    # Results that only some calls made follow from a branch, which is reported.
    places = [frozenset(own.place if isinstance(own, Result) else own for own in one) for one in sources]
    if not all(places) or frozenset.intersection(*places):
        return None
    made = {source.site for own in sources for source in own if isinstance(source, Result)}
    if any(len({len(call.run.operations.get(site, ())) for call in calls}) > 1 for site in made):
        return None
    return [min(own, key=str) for own in sources]


def _changed_scalars(
    site: CallSite, operations: Sequence[OperatorCall], calls: Sequence[ObservedCall]
) -> Iterator[str]:
    for name in operations[0].scalars:
        values = [operation.values.get(name) for operation in operations]
        numbers = all(isinstance(value, int | float | complex) for value in values)
        if numbers and not all(_equal(value, values[0]) for value in values) and not _origin(values, site, calls):
            yield _describe(name, values, site, calls)


def _describe(name: str, values: Sequence[Value | Source | None], site: CallSite, calls: Sequence[ObservedCall]) -> str:
    pairs = [f"{value} in {call.name}" for value, call in zip(values, calls, strict=True)]
    return f"{name} of {site.name} is {', '.join(pairs)}"


def _equal(value: Value | None, other: Value | None) -> bool:
    """Return True if two values are equal; NaN equals NaN."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_equal, value, other))
    return value == other or (value != value and other != other)


def _follows_from_sizes(
    values: Sequence[Value | None], operations: Sequence[OperatorCall], calls: Sequence[ObservedCall]
) -> bool:
    """Return True if every difference between values follows from sizes."""
    known = [
        operation.sizes | call.sizes | dict(call.run.sizes[: operation.sizes_read])
        for operation, call in zip(operations, calls, strict=True)
    ]
    slots = [[sizes[name] for sizes in known] for name in known[0] if all(name in sizes for sizes in known)]
    lists = [value if isinstance(value, tuple) else (value,) for value in values]
    if len({len(own) for own in lists}) > 1:
        return False
    for column in zip(*lists, strict=True):
        if not all(_equal(value, column[0]) for value in column) and not any(
            _follows_size(column, slot) for slot in slots
        ):
            return False
    return True


def _follows_size(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    if not all(type(value) is int for value in values):
        return False
    multiple = all(value * sizes[0] == values[0] * size for value, size in zip(values, sizes, strict=True))
    apart = {value - size for value, size in zip(values, sizes, strict=True)}
    return (multiple and sizes[0] > 0) or apart in ({1}, {-1})


def _origin(values: Sequence[Value | None], site: CallSite, calls: Sequence[ObservedCall]) -> str:
    """Describe where a number comes from, if known: an argument, or a line that read it from a tensor."""
    for name in calls[0].numbers:
        if all(_equal(call.numbers.get(name), value) for call, value in zip(calls, values, strict=True)):
            return f", the argument {name!r}"
    here = site.lines[0]
    for line in sorted(calls[0].run.reads, key=lambda line: (line.file, line.function) != (here.file, here.function)):
        read = all(_was_read(value, call.run.reads.get(line, set())) for call, value in zip(calls, values, strict=True))
        if read and line != here:
            return f"{READ} {line.file}:{line.number}"
    return ""


def _was_read(value: Value | None, numbers: set[Number]) -> bool:
    return set(value if isinstance(value, tuple) else (value,)) <= numbers
