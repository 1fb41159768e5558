"""The part of the proof that needs no graph: the declared forward, run eager on items that no budget needs to hold."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from varlen_graphs.capture.agreement import Failure
from varlen_graphs.errors import SpecError, VerificationError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.kernels.operator import references
from varlen_graphs.layout.items import Layout
from varlen_graphs.spec.call import Call
from varlen_graphs.spec.declared_outputs import extents
from varlen_graphs.spec.entries import CountedEntries
from varlen_graphs.spec.outputs import flatten
from varlen_graphs.spec.reading import read_layout
from varlen_graphs.verify.compare import Expected, few
from varlen_graphs.verify.error_locator import DECLARED
from varlen_graphs.verify.examples import permuted
from varlen_graphs.verify.mixing import Inputs, explain_together
from varlen_graphs.verify.trial import TOGETHER, Example
from varlen_graphs.verify.wrong_buffers import wrong_buffers
from varlen_graphs.watch.made_up_run import run_made_up

COUNTS = (
    "In a batch they do not. Declare of_item, the number of entries that the module makes of an item, as the same "
    "function of its rows for all outputs and masks that have as many; if it takes multiples only, as Rows(every=...). "
    "If it takes only some lengths for another reason, and no others come, pass verify=vg.Verify(prove=False)."
)

SOME_ROWS = (
    "Among others they do not, so the module takes some numbers of rows only, in which items may act on each other "
    "wherever they begin. Declare a multiple that each item has, such as by merge= or Rows(every=...); or, if all that "
    "come have one, pass verify=vg.Verify(prove=False), and prove graphs on your own calls with encoder.verify(calls)."
)

COUNTED = "Or functions of the declaration count other numbers of entries than items have."

APART = 4
"""Ratio to the tolerance of what runs of other sizes may differ by: matrix products round differently."""


def evidence_of(failure: Failure | None) -> str | None:
    """Return the evidence against a declaration that a failure is, or `None`.

    Raises:
        SpecError: The failure says that the declaration does not match the module.
    """
    if failure is not None and isinstance(failure.error, SpecError):
        raise failure.error
    return str(failure.error) if failure is not None and isinstance(failure.error, VerificationError) else None


def check_eager(forward: Forward, example: Example, limit: float, parts: Sequence[Sequence[range]] = ()) -> None:
    """Check that the declared forward gives the expected output, and some groups of items what they get alone.

    Args:
        forward: The forward.
        example: Items, and the expected output.
        limit: Largest error allowed.
        parts: What runs alone, in groups of items. By default each of the last two groups.

    Raises:
        VerificationError: It does not; the message says where.
        SpecError: The same, where entries may be counted wrongly and nothing else can answer calls.
    """
    call, layout, expected, against, output, by_references, _ = example
    found = expected.furthest(output, layout, range(len(layout)), call.padded)
    if found.error > limit and found.error > example.allowed(forward, limit, output):
        what = f"{found.where} differs by {found.error:.1e} from {against} (tolerance {limit:.0e})"
        named = wrong_buffers(forward, call, expected, limit)
        raise VerificationError(f"wrong for items {few(layout)}: {what}\n{DECLARED} {named}".rstrip())
    together = Expected(output.rebuild(output.tensors), layout, call.padded)
    for part in parts or [[group] for group in layout.groups[-2:]]:
        order, alone = permuted(forward.spec, call, layout, part)
        own = read_layout(forward.spec, alone)
        try:
            with references() if by_references else nullcontext():
                parts = run_made_up(partial(forward.exact, alone), call.rows.device)
        except Exception as error:
            if forward.spec.counts_rows and min(own.rows) >= forward.spec.shortest:
                raise _miscounted(forward, alone, own, error) from error
            if forward.spec.layout.padded or isinstance(error, SpecError | torch.OutOfMemoryError):
                raise
            raise VerificationError(f"wrong for items {few(own)}: alone, they raise {error!r}\n{SOME_ROWS}") from error
        found = together.furthest(flatten(parts, forward.spec.declared), own, order, call.padded)
        if found.error > APART * limit:
            what = f"alone, {found.where} differs by {found.error:.1e}"
            counts = any(isinstance(extent, CountedEntries) for extent in extents(forward.spec.declared))
            kind = _kind(forward, call) if counts else VerificationError
            why = f"{TOGETHER} {COUNTED}" if counts else TOGETHER
            raise kind(f"wrong for items {few(layout)}: {what}\n{why}\n{_mixing(forward, call, layout)}".rstrip())


def _mixing(forward: Forward, call: Call, layout: Layout) -> str:
    """Name the operation through which the items of a call act on each other; empty if it is not found."""

    def run(inputs: Inputs) -> Any:
        return forward.exact(replace(call, rows=inputs[0].clone(), inputs=inputs[1]))

    if call.padded:
        return ""
    with suppress(Exception):  # of the module's own code, or the device's memory
        return explain_together(forward, layout, run, (call.rows, call.inputs))
    return ""


def in_two(layout: Layout, unit: int = 1) -> list[list[range]]:
    """Return the groups of items in two parts, which are no halves: their numbers have few divisors in common.

    If possible, the units of rows of the first part are no multiple of any small number: a module may see all rows in
    groups of so many.
    """
    third, units = max(1, len(layout.groups) // 3), [rows // unit for rows in accumulate(layout.group_rows)]
    splits = (at for at, count in enumerate(units, start=1) if at >= third and all(count % n for n in range(2, 33)))
    split = min(next(splits, third), len(units) - 1)
    return [layout.groups[:split], layout.groups[split:]]


def check_lengths(forward: Forward, calls: Iterable[Call]) -> None:
    """Check that the declared forward takes items of any length, where the declaration counts their entries.

    Args:
        forward: The forward.
        calls: Calls of one item each, the longest first: the module may have a limit, and take none that is as long.

    Raises:
        VerificationError, SpecError: It does not; the message names the item.
    """
    takes_longer = False
    for call in calls:
        try:
            run_made_up(partial(forward.exact, call), call.rows.device)
            takes_longer = True
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if takes_longer:
                raise _miscounted(forward, call, read_layout(forward.spec, call), error) from error


def _miscounted(forward: Forward, call: Call, layout: Layout, error: Exception) -> Exception:
    """Return the error for a number of entries that is wrong."""
    return _kind(forward, call)(f"wrong for items {few(layout)}: alone, they raise {error!r}\n{COUNTS}")


def _kind(forward: Forward, call: Call) -> type[Exception]:
    """Return the kind of error for a wrong number of entries: one that ends the call if nothing else can answer it."""
    return VerificationError if forward.answers_itself(call) else SpecError


def check_left_out(forward: Forward, example: Example, limit: float) -> None:
    """Check that calls without the arguments that they may leave out get what the module itself makes of such calls.

    Raises:
        VerificationError: They do not; the message names the arguments.
    """
    call = forward.leaving_out(example.call)
    if call.beyond or not (forward.is_module or forward.answers_itself(call)):
        return
    device = call.rows.device
    try:
        own = run_made_up(partial(forward.without, call), device)
    except Exception:  # it needs what the encoder adds
        return
    output = run_made_up(partial(forward.exact, call), device)
    layout = read_layout(forward.spec, call)
    expected = Expected(own, layout, call.padded)
    found = expected.furthest(flatten(output, forward.spec.declared), layout, range(len(layout)), call.padded)
    if found.error > limit:
        forward.verdict.differs_without = True
        names = ", ".join(map(repr, sorted(example.call.original.keys() - call.original.keys())))
        raise VerificationError(
            f"wrong for calls that leave {names} out: {found.where} differs by {found.error:.1e} from the module "
            f"itself (tolerance {limit:.0e}), for which the defaults mean something else. Declare defaults that mean "
            "the same, or none: then calls must bring the arguments"
        )
