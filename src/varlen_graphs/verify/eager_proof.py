"""The part of the proof that needs no graph: the declared forward, run eager on items that no budget needs to hold."""

from collections.abc import Sequence
from functools import partial

from varlen_graphs.errors import VerificationError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.kernels.operator import references
from varlen_graphs.layout.items import Layout
from varlen_graphs.spec.outputs import flatten
from varlen_graphs.spec.reading import read_layout
from varlen_graphs.verify.compare import Expected, few
from varlen_graphs.verify.error_locator import DECLARED
from varlen_graphs.verify.examples import permuted
from varlen_graphs.verify.trial import TOGETHER, Example
from varlen_graphs.watch.made_up_run import run_made_up

COUNTS = (
    "In a batch they do not. Declare of_item, the number of entries that the module makes of an item, as the same "
    "function of its rows for all outputs and masks that have as many; if it takes multiples only, as Rows(every=...)."
)

APART = 4
"""Ratio to the tolerance of what runs of other sizes may differ by: matrix products round differently."""


def check_eager(forward: Forward, example: Example, limit: float, parts: Sequence[Sequence[range]] = ()) -> None:
    """Check that the declared forward gives the expected output, and some groups of items what they get alone.

    Args:
        forward: The forward.
        example: Items, and the expected output.
        limit: Largest error allowed.
        parts: What runs alone, in groups of items. By default each of the last two groups.

    Raises:
        VerificationError: It does not; the message says where.
    """
    call, layout, expected, against, output, _ = example
    found = expected.furthest(output, layout, range(len(layout)), call.padded)
    if found.error > limit and found.error > example.allowed(forward, limit, output):
        what = f"{found.where} differs by {found.error:.1e} from {against} (tolerance {limit:.0e})"
        raise VerificationError(f"wrong for items {few(layout)}: {what}\n{DECLARED}")
    together = Expected(output.rebuild(output.tensors), layout, call.padded)
    for part in parts or [[group] for group in layout.groups[-2:]]:
        order, alone = permuted(forward.spec, call, layout, part)
        own = read_layout(forward.spec, alone)
        try:
            with references():
                parts = run_made_up(partial(forward.exact, alone), call.rows.device)
        except Exception as error:
            if forward.spec.counts_rows and min(own.rows) >= forward.spec.shortest:
                raise VerificationError(f"wrong for items {few(own)}: alone, they raise {error!r}\n{COUNTS}") from error
            raise
        found = together.furthest(flatten(parts, forward.spec.declared), own, order, call.padded)
        if found.error > APART * limit:
            what = f"alone, {found.where} differs by {found.error:.1e}"
            raise VerificationError(f"wrong for items {few(layout)}: {what}\n{TOGETHER}")


def in_two(layout: Layout) -> list[list[range]]:
    """Return the groups of items in two parts, which are no halves: their numbers have few divisors in common."""
    third = len(layout.groups) // 3
    return [layout.groups[:third], layout.groups[third:]]


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
    with references():
        output = run_made_up(partial(forward.exact, call), device)
    layout = read_layout(forward.spec, call)
    expected = Expected(own, layout, call.padded)
    found = expected.furthest(flatten(output, forward.spec.declared), layout, range(len(layout)), call.padded)
    if found.error > limit:
        forward.differs_without = True
        names = ", ".join(map(repr, sorted(example.call.original.keys() - call.original.keys())))
        raise VerificationError(
            f"wrong for calls that leave {names} out: {found.where} differs by {found.error:.1e} from the module "
            f"itself (tolerance {limit:.0e}), for which the defaults mean something else. Declare defaults that mean "
            "the same, or none: then calls must bring the arguments"
        )
