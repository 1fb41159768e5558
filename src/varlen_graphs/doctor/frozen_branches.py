"""Search for loops and branches that a graph would freeze: those that run differently for other layouts."""

from collections.abc import Iterable, Iterator, Sequence, Set

from varlen_graphs.doctor.branches import (
    Control,
    controls_around,
    deciding_control,
    exit_before,
    function_around,
    is_turn,
)
from varlen_graphs.doctor.frozen import ObservedCall
from varlen_graphs.doctor.run_record import CallSite, Occurrence
from varlen_graphs.torch_dispatch.lines import Line

Changed = tuple[Line, CallSite]
"""A line that did not run equally often in all calls, and what it ran."""


def frozen_branches(calls: Sequence[ObservedCall]) -> list[Occurrence]:
    """Find loops and branches in which torch functions ran in some calls only, or not equally often in all calls."""
    # If no loop or branch is found, an early return before the first such line of the function is reported.
    changed: list[CallSite] = []
    steady: list[CallSite] = []
    for site in dict.fromkeys(site for call in calls for site in call.run.functions):
        as_often = len({_count(call, site) for call in calls}) == 1
        (steady if as_often else changed).append(site)
    stacks = {site.lines[at:] for site in steady for at in range(len(site.lines))}
    # Of a line in a loop, some operations may run in one turn only, such as the sum of the number 0 and a tensor.
    turns = {line for line in {site.lines[0] for site in changed} if is_turn(line)}
    decided: dict[Line, tuple[Control, list[Changed]]] = {}
    undecided: dict[tuple[str, int], list[Changed]] = {}
    for site in changed:
        line = _changing_line(site, stacks)
        numbers = {own.number for other in steady for own in other.lines if own.file == line.file and own not in turns}
        if deciding := deciding_control(line, numbers):
            decided.setdefault(line._replace(number=deciding.lineno), (deciding, []))[1].append((line, site))
        else:
            undecided.setdefault((line.file, function_around(line)), []).append((line, site))
    for line, (_, later) in list(decided.items()):
        own = undecided.get((line.file, function_around(line)))
        if own and min(own)[0].number < line.number and _ended(calls, own, later):
            own += decided.pop(line)[1]
    found = [*((line, own) for line, (_, own) in decided.items()), *_nested(calls, decided.values())]
    found += [(exit_before(min(line for line, _ in own)), own) for own in undecided.values()]
    return [occurrence for line, own in found for occurrence in _occurrences(calls, line, [site for _, site in own])]


def _changing_line(site: CallSite, stacks: Set[tuple[Line, ...]]) -> Line:
    """Return the outermost line of the stack under which everything changed, not the lines that it calls.

    Lines that run in every call of their function do not decide.
    """
    changed = [line for at, line in _outside_in(site) if site.lines[at:] not in stacks] or [site.lines[0]]
    return next((line for line in changed if controls_around(line) or exit_before(line) != line), changed[0])


def _nested(
    calls: Sequence[ObservedCall], decided: Iterable[tuple[Control, list[Changed]]]
) -> Iterator[tuple[Line, list[Changed]]]:
    """Yield branches and loops inside others, or in what they call, that did not run in proportion to these."""
    for outer, own in decided:
        inside: dict[Control, tuple[Line, list[Changed]]] = {}
        direct = []
        for line, site in own:
            around = _inside(outer, line, site)
            if not around:
                direct.append((line, site))
            for place, control in around:
                inside.setdefault(control, (place, []))[1].append((line, site))
        for control, (place, inner) in inside.items():
            outside = direct or [other for other in own if other not in inner]
            if outside and not any(_in_proportion(calls, one, other) for one in inner for other in outside):
                yield place._replace(number=control.lineno), inner


def _inside(outer: Control, line: Line, site: CallSite) -> list[tuple[Line, Control]]:
    """Return the branches and loops between an outer one and an operation, with lines in them."""
    around = controls_around(line)
    between = around[around.index(outer) + 1 :] if outer in around else []
    called = site.lines[: site.lines.index(line)][::-1] if line in site.lines else ()
    return [(line, own) for own in between] + [(deeper, own) for deeper in called for own in controls_around(deeper)]


def _in_proportion(calls: Sequence[ObservedCall], one: Changed, other: Changed) -> bool:
    counts = [(_count(call, one[1]), _count(call, other[1])) for call in calls]
    return len({(a / b if b else None) for a, b in counts if a or b}) == 1


def _occurrences(calls: Sequence[ObservedCall], line: Line, sites: Sequence[CallSite]) -> list[Occurrence]:
    counts = [sum(_count(call, site) for site in sites) for call in calls]
    ran = [f"{n} operation{'s' * (n != 1)} in {call.name}" for n, call in zip(counts, calls, strict=True)]
    modules = {path for call in calls for site in sites for path in call.run.functions.get(site, ())}
    turns = [call.run.turns.get(line, 0) for call in calls]
    # A loop over a tensor has as many turns as a budget has items or segments.
    sized = all(turns) and all(n * turns[0] == counts[0] * own for n, own in zip(counts, turns, strict=True))
    kind = "padded size" if sized else "frozen branch"
    return [Occurrence(kind, f"it ran {', '.join(ran)}", line, module) for module in _outermost(modules)]


def _ended(calls: Sequence[ObservedCall], own: Sequence[Changed], later: Sequence[Changed]) -> bool:
    """Return True if some calls returned before what they did not run, so that they did not run what comes later."""
    ended = [call for call in calls if not any(_count(call, site) for _, site in own)]
    return bool(ended) and not any(_count(call, site) for call in ended for _, site in later)


def _outermost(paths: Set[str]) -> list[str]:
    """Return the paths of submodules that lie inside no other one."""
    return sorted(path for path in paths if not any(_is_inside(path, other) for other in paths))


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _outside_in(site: CallSite) -> list[tuple[int, Line]]:
    return list(enumerate(site.lines))[::-1]


def _count(call: ObservedCall, site: CallSite) -> int:
    return len(call.run.functions.get(site, ()))
