"""What an encoder is made of and did so far, for people."""

from collections.abc import Sequence

from varlen_graphs.routing.in_use import InUse
from varlen_graphs.stats import Stats


def report(
    name: str,
    in_use: InUse,
    stats: Stats,
    seconds: dict[str, float],
    kept: Sequence[str] = (),
    failure: str | None = None,
    lazy: bool = False,
) -> str:
    """A table of the budgets, those that were used and are gone too, and what happened.

    Args:
        name: What to call the encoder.
        in_use: The budgets, and what was measured of them.
        stats: The counters.
        seconds: What was done before the first replay, and how long each part took.
        kept: Tensors that captured runs made and somebody keeps.
        failure: Why there is no graph, if the capture failed.
        lazy: Whether calls do not wait for graphs.
    """
    costs, out, used = in_use.costs, dict(in_use.out), [*stats.replays]  # at one moment
    lines = [name]
    if failure is not None:
        lines += [f"nothing could be captured, so calls {'run eager' if lazy else 'raise an error'}: {failure}"]
    if seconds:
        lines += ["; ".join(f"{part} {took:.2f} s" for part, took in seconds.items())]
    lines += ["", f"{'rows':>8}{'items':>8}{'segments':>10}{'ms':>10}{'replays':>9}"]
    for budget in sorted({*costs.replays, *out, *used}):
        cost = f"{costs.replays[budget]:.3f}" if costs.measured and budget in costs.replays else "-"
        note = "" if budget in in_use.budgets else "  dropped"
        note = "  not used: a larger one takes no longer" if budget in costs.dropped else note
        note = f"  out of use: {out[budget]}" if budget in out else note
        lines += [f"{budget.rows:>8}{budget.items:>8}{budget.segments:>10}{cost:>10}{stats.replays[budget]:>9}{note}"]
    if costs.measured:
        long = costs.per_square * 1024**2
        lines += [
            "",
            f"ms of one replay, attention aside; attention adds {long:.3f} ms for each segment of 1024 rows, and four "
            "times as much for twice the rows",
            f"a call without a graph takes {costs.host:.2f} ms or more",
        ]
    if costs.bytes_per_row is not None:
        lines += [f"pool and arena take {costs.bytes_per_row:,.0f} bytes for each row of the largest budget"]
    lines += [
        "",
        f"{stats.calls} calls of {stats.items} items; {stats.replays.total()} replays of {stats.rows} rows, and "
        f"{stats.padding_share:.1%} padding",
    ]
    if stats.checked:
        lines += [f"{stats.checked.total()} replays compared with the module itself, {stats.wrong.total()} wrong"]
    lines += [f"{count} runs without a graph: {reason}" for reason, count in stats.eager.most_common()]
    lines += [f"kept in the memory of graphs, which replays overwrite: {tensor}" for tensor in kept]
    return "\n".join(lines)
