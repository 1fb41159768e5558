"""The graphs and the memory of an encoder now, as metrics beside its counters."""

from collections.abc import Iterable

from varlen_graphs.errors import StaleGraphError
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
            ((part,), round(took, 3)) for part, took in seconds
        ]),
        Metric("capturing", "1 while an encoder of the pool captures graphs.", (), [((), int(store.pool.busy))]),
    ]  # fmt: skip
    if (held := bytes_now(store)) is not None:
        text = "Bytes of graphs, arena and pool; a shared pool counts in full."
        found.append(Metric("bytes", text, (), [((), held)]))
    return found


def bytes_now(store: GraphStore) -> int | None:
    """Return the bytes that graphs, arena and pool hold; `None` while the pool is in use."""
    pool = store.pool
    try:
        pool.check_process()
    except StaleGraphError:  # it was forked, and CUDA does not work in it
        return None
    if not pool.lock.acquire(blocking=False):
        return None
    try:
        return store.bytes()
    finally:
        pool.lock.release()


def bytes_of(stores: Iterable[GraphStore]) -> int:
    """Return the bytes that graphs, arenas and pools of several encoders hold, each pool once."""
    pools: dict[int, list[GraphStore]] = {}
    for store in stores:
        pools.setdefault(id(store.pool), []).append(store)
    held = 0
    for own in pools.values():
        with own[0].pool.exclusive(), own[0].pool.order:
            held += own[0].pool.bytes() + sum(store.bytes_beside_pool() for store in own)
    return held
