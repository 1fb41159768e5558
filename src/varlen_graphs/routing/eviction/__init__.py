"""Eviction policies: one file each, chosen by name in `Memory(limit, policy=...)`."""

from collections.abc import Callable

from varlen_graphs.routing.eviction.least_useful import LeastUseful
from varlen_graphs.routing.eviction.policy import EvictionPolicy

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"least_useful": LeastUseful}
