"""Looks at a module: runs it on example calls, and gathers what it did."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from varlen_graphs.capture.base import CAPTURING
from varlen_graphs.doctor.declarations import declaration_for
from varlen_graphs.doctor.findings import NATURES, Diagnosis, Finding, collapse
from varlen_graphs.doctor.frozen import Observed, frozen_branches, frozen_values
from varlen_graphs.doctor.modules import Running
from varlen_graphs.doctor.observe import Run, Sighting, observe, storage_key
from varlen_graphs.errors import InputError

Call = tuple[tuple[Any, ...], dict[str, Any]]

MANY = 3
"""Different things that one line did are told up to so many."""


def diagnose(module: nn.Module, *calls: Any) -> Diagnosis:
    """Find all that keeps a module from being captured, and all that a capture would freeze.

    The module is run eager, twice for each call, on the CPU or on a GPU; nothing is captured. Tensors of a call are
    copied first; what the module writes into its own state stays written. On the CPU tensors of a call count as
    tensors of the device, as on the tape. Syncs wherever the module does.

    Frozen values are looked for among calls of as many rows: give two or more, with other items. The rows of a call are
    its largest tensor.

    Args:
        module: As it would be captured, so in `eval()` mode.
        calls: Example calls. A dict is the keyword arguments of one, a tuple its positional arguments, and anything
            else its only argument.

    Raises:
        InputError: There are no calls.
    """
    if not calls:
        raise InputError("diagnose() needs example calls: a dict of keyword arguments or a tuple of arguments each")
    examples = [_as_call(call) for call in calls]
    first = next(chain(module.parameters(), module.buffers(), _tensors(examples[0])), torch.empty(0))
    with CAPTURING:
        runs = [[_observe(module, example, first.device) for _ in range(2)] for example in examples]
    observed = [
        [Observed(name, run, _sizes(example), _numbers(example)) for name, run in zip(names, pair, strict=True)]
        for example, pair, names in zip(examples, runs, _names(len(runs)), strict=True)
    ]
    per_call = [[*second.sightings, *kept] for (_, second), kept in zip(runs, _kept(runs), strict=True)]
    per_call += [frozen_values(pair) for pair in observed]  # numbers that differ from run to run
    groups = _groups(examples)
    for group in groups:
        same_rows = [observed[at][1]._replace(name=f"call {at + 1}") for at in group]
        if len(group) > 1:
            per_call += [frozen_values(same_rows), frozen_branches(same_rows)]
    notes = []
    if alone := [str(group[0] + 1) for group in groups if len(group) == 1]:
        notes.append(
            f"frozen values were not looked for in call {', '.join(alone)}: no other call has rows of the same shape. "
            "Give calls with as many rows and other items."
        )
    return Diagnosis(type(module).__name__, len(calls), _findings(per_call), tuple(notes))


def _as_call(call: Any) -> Call:
    if isinstance(call, Mapping):
        return (), dict(call)
    return (call if isinstance(call, tuple) else (call,)), {}


def _observe(module: nn.Module, call: Call, device: torch.device) -> Run:
    args, kwargs = tree_map_only(Tensor, lambda t: t.clone() if t.device.type == device.type else t, call)
    state = chain(module.named_parameters(), module.named_buffers())
    owners = {storage_key(tensor): ("state written", f"the module's {name}") for name, tensor in state}
    owners |= {
        storage_key(leaf): ("input written", f"the argument {_argument(path)}")
        for path, leaf in tree_flatten_with_path((args, kwargs))[0]
        if isinstance(leaf, Tensor)
    }
    return observe(lambda: module(*args, **kwargs), Running(module), device, owners)


def _kept(runs: Sequence[Sequence[Run]]) -> list[list[Sighting]]:
    """What is alive after the runs of each call: kept by every run, by the very first, or by the first of a call."""
    always = {made.line for _, second in runs for made in second.kept}
    found = []
    for at, (first, second) in enumerate(runs):
        kept = [Sighting("kept memory", f"it keeps {made.form}", made.line, made.module) for made in second.kept]
        kind = "cache by layout" if at else "lazy cache"
        what = f"it keeps {{}}, made in the first run of call {at + 1} only"
        new = [made for made in first.kept if made.line not in always]
        found.append([*kept, *(Sighting(kind, what.format(made.form), made.line, made.module) for made in new)])
    return found


def _groups(examples: Sequence[Call]) -> list[list[int]]:
    """Calls by the shape of their rows."""
    groups: dict[Any, list[int]] = {}
    for at, example in enumerate(examples):
        rows = max(_tensors(example), key=Tensor.numel, default=None)
        groups.setdefault(None if rows is None else rows.shape, []).append(at)
    return list(groups.values())


def _findings(per_call: Sequence[Sequence[Sighting]]) -> tuple[Finding, ...]:
    """What was seen, by kind and line; what stands in the way first."""
    merged: dict[tuple[str, Any], list[list[Sighting]]] = {}
    for sightings in per_call:
        own: dict[tuple[str, Any], list[Sighting]] = {}
        for sighting in sightings:
            own.setdefault((sighting.kind, sighting.line), []).append(sighting)
        for key, parts in own.items():
            merged.setdefault(key, []).append(parts)
    findings = [_finding(*key, parts) for key, parts in merged.items()]
    return tuple(sorted(findings, key=lambda finding: not finding.blocks))


def _finding(kind: str, line: Any, seen: list[list[Sighting]]) -> Finding:
    nature = NATURES[kind]
    whats = list(dict.fromkeys(sighting.what for own in seen for sighting in own))
    more = f"; and {len(whats) - MANY} more" if len(whats) > MANY else ""
    return Finding(
        kind=kind,
        what="; ".join(whats[:MANY]) + more,
        line=line,
        modules=collapse([sighting.module for own in seen for sighting in own]),
        why=nature.why,
        remedy=nature.remedy,
        declaration=declaration_for(kind, line, seen[0][0].module),
        count=max(len(own) for own in seen),
        blocks=nature.blocks,
    )


def _tensors(example: Call) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]


def _sizes(example: Call) -> dict[str, int]:
    leaves = tree_flatten_with_path(example)[0]
    return {
        f"{keystr(path)}.shape[{dim}]": size
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
        for dim, size in enumerate(leaf.shape)
    }


def _numbers(example: Call) -> dict[str, Any]:
    leaves = tree_flatten_with_path(example)[0]
    return {_argument(path): leaf for path, leaf in leaves if isinstance(leaf, bool | int | float | str)}


def _argument(path: Any) -> str:
    """A place in a call as its caller would name it."""
    return keystr(path[1:]).strip("[]'")


def _names(count: int) -> list[tuple[str, str]]:
    return [(f"the first run of call {at}", f"the second of call {at}") for at in range(1, count + 1)]
