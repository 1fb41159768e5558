"""Looks at a module: runs it on example calls, and gathers what it did."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from varlen_graphs.capture.base import CAPTURING
from varlen_graphs.capture.owners import tensors_of
from varlen_graphs.doctor.examples import Example, by_rows
from varlen_graphs.doctor.findings import Diagnosis
from varlen_graphs.doctor.frozen import Observed, frozen_branches, frozen_values, padded_sizes
from varlen_graphs.doctor.gather import gather
from varlen_graphs.doctor.modules import Running
from varlen_graphs.doctor.observe import observe, storage_key
from varlen_graphs.doctor.runs import Run, Sighting
from varlen_graphs.errors import InputError


def diagnose(module: nn.Module, *calls: Any) -> Diagnosis:
    """Find all that keeps a module from being captured, and all that a capture would freeze.

    The module is run eager, twice for each call and a third time for the first, on the CPU or on a GPU; nothing is
    captured. Tensors of a call are copied first; what the module writes into its own state stays written. On the CPU
    tensors of a call count as tensors of the device, as on the tape. Syncs wherever the module does.

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
    examples = [Example.of(call) for call in calls]
    first = next(chain(module.parameters(), module.buffers(), examples[0].tensors().values()), torch.empty(0))
    with CAPTURING:
        runs = [[_observe(module, example, first.device) for _ in range(2)] for example in examples]
        again = _observe(module, examples[0], first.device)
    seen = [[*second.sightings, *kept] for (_, second), kept in zip(runs, _kept(runs), strict=True)]
    named = ("the second run of call 1", runs[0][1]), ("the third run", again)
    first_call = [_observed(*own, examples[0]) for own in named]
    seen += [frozen_values(first_call), frozen_branches(first_call)]
    groups = by_rows(examples)
    for group in groups:
        same_rows = [_observed(f"call {at + 1}", runs[at][1], examples[at]) for at in group]
        seen += [frozen_values(same_rows), frozen_branches(same_rows)]
    all_rows = [_observed(f"call {at + 1}", runs[at][1], example) for at, example in enumerate(examples)]
    told = {sighting.line for sightings in seen for sighting in sightings if sighting.kind == "frozen value"}
    seen.append([sighting for sighting in padded_sizes(all_rows) if sighting.line not in told])
    alone = [str(group[0] + 1) for group in groups if len(group) == 1]
    notes = (
        f"frozen values were not looked for in call {', '.join(alone)}: no other call has rows of the same shape. "
        "Give calls with as many rows and other items.",
    )
    return Diagnosis(type(module).__name__, len(calls), gather(seen), notes if alone else ())


def _observed(name: str, run: Run, example: Example) -> Observed:
    return Observed(name, run, example.sizes(), example.numbers())


def _observe(module: nn.Module, example: Example, device: torch.device) -> Run:
    args, kwargs = copied = example.copied(device)
    state = {name: tensor.detach() for name, tensor in tensors_of(module)}  # held, so that keys stay unique
    owners = {storage_key(tensor): ("state written", f"the module's {name}") for name, tensor in state.items()}
    owners |= {storage_key(own): ("input written", f"the argument {name}") for name, own in copied.tensors().items()}
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
