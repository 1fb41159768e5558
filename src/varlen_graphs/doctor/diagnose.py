"""Diagnosis of a module: runs it on example calls, and merges the records into findings."""

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from varlen_graphs.capture.backend import CAPTURE_LOCK
from varlen_graphs.doctor.advice import summary
from varlen_graphs.doctor.allocations import Owner
from varlen_graphs.doctor.branches import return_line
from varlen_graphs.doctor.encoders import ENCODER_CALLS
from varlen_graphs.doctor.example_call import ExampleCall, group_by_rows
from varlen_graphs.doctor.findings import FINDING_KINDS, Diagnosis
from varlen_graphs.doctor.frozen import READ, ObservedCall, frozen_values, padded_sizes
from varlen_graphs.doctor.frozen_branches import frozen_branches
from varlen_graphs.doctor.graph_check import wrong_replays
from varlen_graphs.doctor.merge import merge_findings
from varlen_graphs.doctor.module_tracker import ModuleTracker
from varlen_graphs.doctor.observe import observe
from varlen_graphs.doctor.probes import other_layouts
from varlen_graphs.doctor.run_record import Occurrence, RunRecord
from varlen_graphs.doctor.sources import Sources, storage_key
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import InputError
from varlen_graphs.shadows.shadow import Shadow, held_by
from varlen_graphs.torch_dispatch.lines import UNKNOWN_LINE, Line
from varlen_graphs.torch_dispatch.rules import has_storage

MOST_PROBED = 3
"""Number of calls whose rows are run with other layouts."""


def diagnose(module: nn.Module, *calls: Any) -> Diagnosis:
    """Find every line that prevents a module from being captured, and every value that a capture would freeze.

    Runs the module itself once, on the first call, as an encoder does: it keeps what one call leaves behind. Runs a
    copy of it, which shares its parameters, twice more on the first call and twice on each other; and, if something
    prevents a capture, twice on each, to recognise what it computes of its items. All runs are eager,
    on the CPU or on a GPU; nothing is captured. Tensors of a call are copied first. On the CPU, tensors of a call count
    as device tensors, as on the tape. Syncs wherever the module does.

    If nothing prevents a capture, and the calls bring rows alone, or rows and their items, graphs of a module on the
    CPU are also verified on the tape, as at a capture.

    Frozen values show as differences between calls with equally many rows: pass two or more of these, with different
    items. The largest tensor of a call is taken as its rows. Calls of two tensors by name, rows and items, are also run
    with other items.

    Args:
        module: The module, in the mode in which it would be captured, usually `eval()`.
        calls: Example calls. A dict holds keyword arguments, a tuple positional arguments, and anything else is a
            single argument.

    Returns:
        The findings, blocking ones first.

    Raises:
        InputError: `module` is no `torch.nn.Module`, one that torch.jit has compiled, or one without weights yet, or
            there are no calls.
    """
    if not isinstance(module, nn.Module) or isinstance(module, GraphedEncoder):
        raise InputError(
            f"diagnose() got a {type(module).__name__}: expected a torch.nn.Module; of an encoder, pass encoder.module "
            "and calls with all of its arguments, declared buffers included"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"diagnose() got a {type(module).__name__}, whose lines torch.jit has compiled, so that none can be named: "
            "pass the module that it was made of"
        )
    if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
        raise InputError(
            f"diagnose() got a {type(module).__name__} whose weights are made in its first call: expected weights; "
            "call it once before"
        )
    if not calls:
        raise InputError(
            "diagnose() got no example calls: expected at least one, each a dict of keyword arguments or a tuple of "
            "positional arguments; pass diagnose(module, call, ...)"
        )
    examples = [ExampleCall.of(call) for call in calls]
    first = next(
        chain(module.parameters(), module.buffers(), examples[0].tensors().values()), torch.empty(0, device="cpu")
    )
    with CAPTURE_LOCK, torch.inference_mode(False):
        on_host: dict[int, Tensor] = {}
        own = _observe(module, frozenset(), first.device, on_host, examples[0])
        shadow = Shadow(module)
        on_host |= {storage_key(t): t for _, original, t in shadow.cloned if storage_key(original) in on_host}
        shared = frozenset(storage_key(tensor) for tensor in shadow.shared if has_storage(tensor))
        run = partial(_observe, shadow.module, shared, first.device, on_host)
        runs = [[own, run(examples[0])], *([run(example), run(example)] for example in examples[1:])]
        third = run(examples[0])
    seen = [[*pair[1].occurrences, *kept, *_errors(pair)] for pair, kept in zip(runs, _kept(runs), strict=True)]
    known = {own.line for own in chain(*seen) if own.kind == "state written"}
    seen.append([own for own in runs[0][0].occurrences if own.kind == "state written" and own.line not in known])
    seen.append(_errors([runs[0][1], third]))
    named = ("the second run of call 1", runs[0][1]), ("the third run", third)
    seen += _compared([ObservedCall.of(*own, examples[0]) for own in named])
    calls_seen = [ObservedCall.of(f"call {at + 1}", runs[at][1], example) for at, example in enumerate(examples)]
    groups = group_by_rows(examples)
    for group in groups:
        seen += _compared([calls_seen[at] for at in group])
    alone = [group[0] for group in groups if len(group) == 1]
    lines = {own.line for found in seen for own in found if FINDING_KINDS[own.kind].blocks}
    for at in sorted(range(len(examples)), key=lambda at: at not in alone)[:MOST_PROBED]:
        with CAPTURE_LOCK, torch.inference_mode(False):
            probed = _probed(run, calls_seen[at], examples[at])
        if probed is not None and at in alone:
            alone.remove(at)
        seen.append([own for own in probed or () if own.line not in lines and FINDING_KINDS[own.kind].blocks])
        lines |= {own.line for own in seen[-1]}
    reported = {own.line for found in seen for own in found if own.kind == "frozen value"}
    seen.append([own for own in padded_sizes(_completed(calls_seen)) if own.line not in reported])
    if not any(FINDING_KINDS[own.kind].blocks for found in seen for own in found):
        with torch.inference_mode(False):
            seen.append(wrong_replays(shadow.module, examples[0], _forward_line(module)))
    findings = merge_findings(seen)
    with CAPTURE_LOCK, torch.inference_mode(False):
        advice = summary(shadow.module, examples, findings)
    return Diagnosis(type(module).__name__, len(calls), findings, _notes(alone), advice)


def _notes(unchecked: Sequence[int]) -> tuple[str, ...]:
    """Describe which of the user's calls could not be compared with any other one."""
    if not unchecked:
        return ()
    calls = f"call{'s' * (len(unchecked) > 1)} {', '.join(str(at + 1) for at in sorted(unchecked))}"
    return (
        f"{calls} could not be checked for frozen values: no other call has rows of the same shape, and the module "
        "does not take the same rows with other items. Pass calls with equally many rows and different items.",
    )


def _probed(
    run: Callable[[ExampleCall], RunRecord], call: ObservedCall, example: ExampleCall
) -> list[Occurrence] | None:
    """Return what differs from calls with the same rows and other items; `None` if the module takes none of them."""
    found: list[Occurrence] | None = None
    for difference, probe in other_layouts(example):
        runs = [run(probe) for _ in range(2)]
        if not _errors([call.run, *runs]):
            other = ObservedCall.of(f"{call.name} with {difference}", runs[1], probe)
            differing = [own for own in chain(*_compared([call, other])) if READ not in own.what]  # others are reported
            found = [*(found or ()), *runs[1].occurrences, *differing]
    return found


def _compared(calls: Sequence[ObservedCall]) -> list[list[Occurrence]]:
    whole = _completed(calls)
    return [frozen_values(whole), frozen_branches(whole)]


def _completed(calls: Sequence[ObservedCall]) -> list[ObservedCall]:
    """Drop calls whose runs raised: they ran fewer operations, for a reason that is reported already."""
    return [call for call in calls if call.run.error is None]


def _errors(runs: Sequence[RunRecord]) -> list[Occurrence]:
    """Return the error of the first run that raised, as a list of at most one."""
    return [run.error for run in runs if run.error is not None][:1]


def _observe(
    module: nn.Module,
    shared: Set[int],
    device: torch.device,
    on_host: dict[int, Tensor],
    example: ExampleCall,
) -> RunRecord:
    """Run a module on a call, without writing to what it shares with another one."""
    args, kwargs = copied = example.copied(device)
    state = [(name, tensor.detach()) for name, tensor in _state(module)]  # held, so that the keys stay unique
    owners = {storage_key(tensor): Owner("state written", f"the module's {name}") for name, tensor in state}
    arguments = {name: tensor for name, tensor in copied.tensors().items() if has_storage(tensor)}
    for name, tensor in arguments.items():
        in_list = name not in copied.arguments()
        owners[storage_key(tensor)] = Owner("input written", f"the argument {name}", in_list)
    sources = Sources()
    for name, tensor in state:
        sources.add(tensor, f"the module's {name}")
    for name, tensor in arguments.items():
        sources.add(tensor, f"the argument {name}")
    run = observe(lambda: module(*args, **kwargs), ModuleTracker(module), device, owners, sources, on_host, shared)
    run.occurrences += _replaced(module, state, run)
    forward = _forward_line(module)
    run.occurrences = [own._replace(line=forward) if own.line == UNKNOWN_LINE else own for own in run.occurrences]
    run.returned_at = return_line(forward)
    return run


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and value of each tensor that a module holds."""
    for path, value, _ in held_by(module, {}):
        if isinstance(value, Tensor) and has_storage(value):
            yield path, value


def _replaced(module: nn.Module, before: Sequence[tuple[str, Tensor]], run: RunRecord) -> list[Occurrence]:
    """Find parameters, buffers and other tensors it had read before, that a run replaced by other memory."""
    registered = {name for name, _ in chain(module.named_parameters(), module.named_buffers())}
    now: dict[str, list[int]] = {}
    for name, tensor in _state(module):
        now.setdefault(name, []).append(storage_key(tensor))
    replaced = []
    for name, tensor in before:
        counts = name in registered or f"the module's {name}" in run.used
        keys = now.get(name, [])
        if counts and keys and storage_key(tensor) not in keys:
            line, path = run.places.get(keys[-1], (_forward_line(module), ""))
            replaced.append(Occurrence("state written", f"it replaces the module's {name}", line, path))
    return replaced


def _forward_line(module: nn.Module) -> Line:
    """Return the line where the forward of a module begins."""
    forwards = (inspect.unwrap(module.forward), inspect.unwrap(type(module).forward))
    codes = (own.__code__ for own in forwards if hasattr(own, "__code__"))
    code = next((code for code in codes if code not in ENCODER_CALLS), None)
    return Line(code.co_filename, code.co_firstlineno, code.co_name) if code else UNKNOWN_LINE


def _kept(runs: Sequence[Sequence[RunRecord]]) -> list[list[Occurrence]]:
    """Find memory that is alive after the runs of each call: kept by every run, or by the first run of a call only."""
    # Lines with written state are excluded, because they are reported already.
    state = {own.line for _, second in runs for own in second.occurrences if own.kind == "state written"}
    always = {made.line for _, second in runs for made in second.kept}
    new = [
        [made for made in first.kept if made.line not in always | state and second.error is None]
        for first, second in runs
    ]
    by_layout = {made.line for made in chain(*new[1:])}
    found = []
    for at, (_, second) in enumerate(runs):
        kept = [made for made in second.kept if made.line not in state]
        occurrences = [Occurrence("kept memory", f"it keeps {made.form}", made.line, made.module) for made in kept]
        for made in new[at]:
            kind = "cache by layout" if made.line in by_layout else "state written" if made.from_data else "lazy cache"
            what = f"it keeps {made.form}, made in the first run of call {at + 1} only"
            what += ", from the contents of its tensors" if kind == "state written" else ""
            occurrences.append(Occurrence(kind, what, made.line, made.module))
        found.append(occurrences)
    return found
