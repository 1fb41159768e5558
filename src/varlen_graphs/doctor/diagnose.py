"""Looks at a module: runs it on example calls, and gathers what it did."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.capture.backend import CAPTURING
from varlen_graphs.doctor.examples import Example, by_rows
from varlen_graphs.doctor.findings import Diagnosis
from varlen_graphs.doctor.frozen import Observed, frozen_branches, frozen_values, padded_sizes
from varlen_graphs.doctor.gather import gather
from varlen_graphs.doctor.modules import Running
from varlen_graphs.doctor.observe import observe, storage_key
from varlen_graphs.doctor.runs import Run, Sighting
from varlen_graphs.errors import InputError
from varlen_graphs.watch.lines import UNKNOWN
from varlen_graphs.watch.owners import tensors_of
from varlen_graphs.watch.rules import has_storage


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
        InputError: There are no calls, or no module.
    """
    if not isinstance(module, nn.Module):
        raise InputError(
            f"diagnose() came with a {type(module).__name__}: expected a torch.nn.Module, of an encoder its module"
        )
    if not calls:
        raise InputError("diagnose() needs example calls: a dict of keyword arguments or a tuple of arguments each")
    examples = [Example.of(call) for call in calls]
    first = next(chain(module.parameters(), module.buffers(), examples[0].tensors().values()), torch.empty(0))
    on_host: dict[int, Tensor] = {}
    with CAPTURING, torch.inference_mode(False):
        runs = [[_observe(module, example, first.device, on_host) for _ in range(2)] for example in examples]
        third = _observe(module, examples[0], first.device, on_host)
    seen = [[*pair[1].sightings, *kept, *_errors(pair)] for pair, kept in zip(runs, _kept(runs), strict=True)]
    seen.append(_errors([runs[0][1], third]))
    named = ("the second run of call 1", runs[0][1]), ("the third run", third)
    seen += _compared([Observed.of(*own, examples[0]) for own in named])
    calls_seen = [Observed.of(f"call {at + 1}", runs[at][1], example) for at, example in enumerate(examples)]
    groups = by_rows(examples)
    for group in groups:
        seen += _compared([calls_seen[at] for at in group])
    told = {sighting.line for sightings in seen for sighting in sightings if sighting.kind == "frozen value"}
    seen.append([sighting for sighting in padded_sizes(_whole(calls_seen)) if sighting.line not in told])
    alone = [str(group[0] + 1) for group in groups if len(group) == 1]
    notes = (
        f"frozen values were not looked for in call {', '.join(alone)}: no other call has rows of the same shape. "
        "Give calls with as many rows and other items.",
    )
    return Diagnosis(type(module).__name__, len(calls), gather(seen), notes if alone else ())


def _compared(calls: Sequence[Observed]) -> list[list[Sighting]]:
    whole = _whole(calls)
    return [frozen_values(whole), frozen_branches(whole)]


def _whole(calls: Sequence[Observed]) -> list[Observed]:
    """Those whose runs did not end early: the others did less for a reason that was told."""
    return [call for call in calls if call.run.error is None]


def _errors(runs: Sequence[Run]) -> list[Sighting]:
    """What ended the first of some runs that raised, if any did."""
    return [run.error for run in runs if run.error is not None][:1]


def _observe(module: nn.Module, example: Example, device: torch.device, on_host: dict[int, Tensor]) -> Run:
    args, kwargs = copied = example.copied(device)
    state = {name: tensor.detach() for name, tensor in _state(module)}  # held, so that keys stay unique
    owners = {storage_key(tensor): ("state written", f"the module's {name}") for name, tensor in state.items()}
    arguments = {name: tensor for name, tensor in copied.tensors().items() if has_storage(tensor)}
    owners |= {storage_key(own): ("input written", f"the argument {name}") for name, own in arguments.items()}
    run = observe(lambda: module(*args, **kwargs), Running(module), device, owners, on_host)
    run.sightings += _replaced(module, state, run)
    return run


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in tensors_of(module) if has_storage(tensor))


def _replaced(module: nn.Module, before: dict[str, Tensor], run: Run) -> list[Sighting]:
    """Parameters and buffers in whose place a run put other memory, and other tensors that it had read before."""
    registered = {name for name, _ in chain(module.named_parameters(), module.named_buffers())}
    made = {storage._cdata: own for own in run.kept if (storage := own.storage()) is not None}
    replaced = []
    for name, tensor in _state(module):
        key = storage_key(tensor)
        counts = name in registered or f"the module's {name}" in run.used
        if counts and name in before and key != storage_key(before[name]):
            line, path = (made[key].line, made[key].module) if key in made else (UNKNOWN, "")
            replaced.append(Sighting("state written", f"it replaces the module's {name}", line, path))
    return replaced


def _kept(runs: Sequence[Sequence[Run]]) -> list[list[Sighting]]:
    """What is alive after the runs of each call: kept by every run, by the very first, or by the first of a call.

    State is left out: it was told.
    """
    state = {own.line for _, second in runs for own in second.sightings if own.kind == "state written"}
    always = {made.line for _, second in runs for made in second.kept}
    found = []
    for at, (first, second) in enumerate(runs):
        kept = [made for made in second.kept if made.line not in state]
        sightings = [Sighting("kept memory", f"it keeps {made.form}", made.line, made.module) for made in kept]
        kind = "cache by layout" if at else "lazy cache"
        what = f"it keeps {{}}, made in the first run of call {at + 1} only"
        new = [made for made in first.kept if made.line not in always | state and second.error is None]
        sightings += [Sighting(kind, what.format(made.form), made.line, made.module) for made in new]
        found.append(sightings)
    return found
