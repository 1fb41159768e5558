"""Checks that need no graph: the declared forward, run eager, compared with the module itself."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from varlen_graphs.capture.memory import is_out_of_memory
from varlen_graphs.declaration.call import Call
from varlen_graphs.declaration.reading import read_layout
from varlen_graphs.errors import SpecError, VerificationError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.kernels.operator import references
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.declared import extents
from varlen_graphs.outputs.entries import CountedEntries
from varlen_graphs.outputs.parts import flatten
from varlen_graphs.torch_dispatch.checked_indices import run_checked
from varlen_graphs.verify.compare import Example, few, limit_of
from varlen_graphs.verify.disagreement import TOGETHER
from varlen_graphs.verify.error_locator import DECLARED
from varlen_graphs.verify.examples import permuted
from varlen_graphs.verify.mixing import Inputs, explain_together
from varlen_graphs.verify.samples import SampleRun
from varlen_graphs.verify.wrong_buffers import wrong_buffers

COUNTS = (
    "In a batch they do not. Declare of_item, the number of entries that the module makes of an item, as the same "
    "function of its rows for all outputs and masks that have as many; if it takes multiples only, as Rows(every=...). "
    "If it takes only some lengths for another reason, and no others come, pass "
    "verify=vg.options.Verify(at_capture=False)."
)

SOME_ROWS = (
    "Among others they do not, so the module takes some numbers of rows only, in which items may act on each other "
    "wherever they begin. Declare a multiple that each item has, such as by merge= or Rows(every=...); or, if all that "
    "come have one, pass verify=vg.options.Verify(at_capture=False), and prove graphs on your own calls with "
    "encoder.verify(calls)."
)

COUNTED = "Or functions of the declaration count other numbers of entries than items have."

FEW_GROUPS = 7
"""Groups of the smallest part of many items: as many as other samples have."""

APART = 4
"""Ratio to the tolerance of what runs of other sizes may differ by: matrix products round differently."""


def check_claim(forward: Forward, tolerance: float | None, call: Call, own: object) -> None:
    """Check that the declared forward, run eager, returns what the module itself returned for a caller's call. Syncs.

    A module that draws random numbers, or a declared forward that cannot run this call, shows nothing.

    Raises:
        SpecError: It returns something else. Only the caller knows which of the two is right.
    """
    layout, limit = read_layout(forward.spec, call), limit_of(tolerance, forward, call.rows.device)
    example = Example(call, own)
    try:
        output = flatten(forward.exact(call), forward.spec.declared)
    except SpecError:
        raise
    except Exception:  # of the caller's own code, for a call that the module itself takes
        return
    found = example.furthest(output)
    if found.error <= example.allowed(found, limit, forward, output):
        return
    if example.differs_from(forward.answer(call), output) > limit:
        return  # the module draws random numbers
    name = f"{type(forward.module).__name__}.{forward.method}"
    named = "".join(f"\n{wrong}" for wrong in [wrong_buffers(forward, example, limit)] if wrong)
    raise SpecError(
        f"forward={getattr(forward.function, '__qualname__', forward.function)!r} computes something other than "
        f"{name}, in whose place it runs: {found.where} differs by {found.error:.1e} (tolerance {limit:.0e}), in a "
        f"call of items {few(layout)}. Expected the same outputs.{named}\nIf it is to compute what another method of "
        "the module does, name that one: GraphedEncoder(..., method='forward_features') runs it, and graphs are proven "
        "against it. If the module itself is right, add declared_by='recipe' to the declaration; if nothing in the "
        "module computes this, verify=vg.options.Verify(at_capture=False)"
    )


def check_eager(forward: Forward, limit: float, sample: SampleRun, parts: Sequence[Sequence[range]] = ()) -> None:
    """Check that the declared forward gives the expected output, and some groups of items what they get alone.

    Args:
        forward: The forward.
        limit: Largest error allowed.
        sample: Items, and the expected output.
        parts: What runs alone, in groups of items. By default each of the last two groups.

    Raises:
        VerificationError: It does not; the message says where.
        SpecError: The same, where entries may be counted wrongly and nothing else can answer calls.
    """
    example, output, by_references, _ = sample
    call, layout, spec = example.call, example.layout, forward.spec
    found = example.furthest(output)
    if found.error > example.allowed(found, limit, forward, output):
        what = f"{found.where} differs by {found.error:.1e} from {example.against} (tolerance {limit:.0e})"
        named = wrong_buffers(forward, example, limit)
        raise VerificationError(f"wrong for items {few(layout)}: {what}\n{DECLARED} {named}".rstrip())
    together = Example(call, output.rebuild(output.tensors))
    for part in parts or [[group] for group in layout.groups[-2:]]:
        order, alone = permuted(spec, call, layout, part)
        own = read_layout(spec, alone)
        try:
            with references() if by_references else nullcontext():
                result = run_checked(partial(forward.exact, alone), call.rows.device)
        except Exception as error:
            if spec.counts_rows and min(own.rows) >= spec.shortest:
                raise _miscounted(forward, alone, own, error) from error
            if spec.layout.padded or isinstance(error, SpecError) or is_out_of_memory(error):
                raise
            raise VerificationError(f"wrong for items {few(own)}: alone, they raise {error!r}\n{SOME_ROWS}") from error
        found = together.furthest(flatten(result, spec.declared), alone, order)
        if found.error > APART * limit:
            what = f"alone, {found.where} differs by {found.error:.1e}"
            counts = any(isinstance(extent, CountedEntries) for extent in extents(spec.declared))
            kind = _kind(forward, call) if counts else VerificationError
            why = f"{TOGETHER} {COUNTED}" if counts else TOGETHER
            raise kind(f"wrong for items {few(layout)}: {what}\n{why}\n{_mixing(forward, call, layout)}".rstrip())


def check_in_parts(forward: Forward, limit: float, sample: SampleRun) -> None:
    """Check the same for two parts of the items, and for a few of many, see `check_eager`."""
    layout = sample.example.layout
    few = [layout.groups[:FEW_GROUPS]] if len(layout.groups) > 4 * FEW_GROUPS else []
    check_eager(forward, limit, sample, _in_two(layout, forward.spec.row_multiple) + few)


def _mixing(forward: Forward, call: Call, layout: Layout) -> str:
    """Name the operation through which the items of a call act on each other; empty if it is not found."""

    def run(inputs: Inputs) -> Any:
        return forward.exact(replace(call, rows=inputs[0].clone(), inputs=inputs[1]))

    if call.padded:
        return ""
    with suppress(Exception):  # of the module's own code, or the device's memory
        return explain_together(forward, layout, run, (call.rows, call.inputs))
    return ""


def _in_two(layout: Layout, unit: int) -> list[list[range]]:
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
            run_checked(partial(forward.exact, call), call.rows.device)
            takes_longer = True
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if takes_longer:
                raise _miscounted(forward, call, read_layout(forward.spec, call), error) from error


def _miscounted(forward: Forward, call: Call, layout: Layout, error: Exception) -> Exception:
    """Return the error for a number of entries that is wrong."""
    return _kind(forward, call)(f"wrong for items {few(layout)}: alone, they raise {error!r}\n{COUNTS}")


def _kind(forward: Forward, call: Call) -> type[Exception]:
    """Return the kind of error for a wrong number of entries: one that ends the call if nothing else can answer it."""
    return VerificationError if forward.answers_itself(call) else SpecError


def check_left_out(forward: Forward, limit: float, sample: SampleRun) -> None:
    """Check that calls without the arguments that they may leave out get what the module itself makes of such calls.

    Raises:
        VerificationError: They do not; the message names the arguments.
    """
    given = sample.example.call
    call = forward.leaving_out(given)
    if call.eager_reason or not (forward.is_module or forward.answers_itself(call)):
        return
    try:
        own = run_checked(partial(forward.without, call), call.rows.device)
    except Exception:  # it needs what the encoder adds
        return
    output = run_checked(partial(forward.exact, call), call.rows.device)
    read_layout(forward.spec, call)
    found = Example(call, own).furthest(flatten(output, forward.spec.declared))
    if found.error > limit:
        forward.verdict.differs_without = True
        left = [name for name, own in given.original.items() if own is not None and call.original.get(name) is None]
        names = ", ".join(map(repr, sorted(left)))
        raise VerificationError(
            f"wrong for calls that leave {names} out: {found.where} differs by {found.error:.1e} from the module "
            f"itself (tolerance {limit:.0e}), for which the defaults mean something else. Declare defaults that mean "
            "the same, or none: then calls must bring the arguments"
        )
