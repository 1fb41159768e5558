"""What an encoder has now, as metrics beside its counters."""

from varlen_graphs.graphs.store import GraphStore
from varlen_graphs.prometheus import Metric


def gauges(store: GraphStore) -> list[Metric]:
    """Return the gauges of an encoder. Waits for nobody: without bytes while the pool has a call or a capture."""
    sets, seconds = store.sets, [*store.seconds.items()]  # copied: other threads change them
    found = [
        Metric("graphs", "Graphs of budgets.", (), [((), sum(map(len, sets)))]),
        Metric("disabled_budgets", "Budgets that no call uses.", (), [((), len(store.budgets.disabled))]),
        Metric("rejected_graphs", "Graphs that failed verification at their capture, and are not used.", (), [
            ((), sum(len(graphs.rejected) for graphs in sets))
        ]),
        Metric("capture_seconds", "Seconds of the parts of captures.", ("part",), [
            ((part.removesuffix(" in").removesuffix(","),), round(took, 3)) for part, took in seconds
        ]),
        Metric("capturing", "1 while an encoder of the pool captures graphs.", (), [((), int(store.pool.busy))]),
    ]  # fmt: skip
    if store.pool.lock.acquire(blocking=False):
        try:
            held = store.bytes()
        finally:
            store.pool.lock.release()
        found.append(
            Metric("bytes", "Bytes of graphs, arena and pool; a shared pool counts in full.", (), [((), held)])
        )
    return found
