"""The parts of an encoder, made from its options."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from torch import nn

from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, Ladder
from varlen_graphs.calls.capture_queue import CaptureQueue
from varlen_graphs.calls.execute import Executor
from varlen_graphs.calls.lazy_capture import LazyRouter
from varlen_graphs.calls.warm_start import WarmStart
from varlen_graphs.capture.mode import BackendName, Mode
from varlen_graphs.capture.pool import Pool
from varlen_graphs.checks.values import quoted
from varlen_graphs.declaration.budgets import default_budgets, resolve_budgets
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.checks import check_budgets
from varlen_graphs.declaration.signature import EagerIf, Signature
from varlen_graphs.errors import SpecError
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.graphs.store import GraphStore
from varlen_graphs.kernels.start import start_triton
from varlen_graphs.options.capture import Capture
from varlen_graphs.options.gpu_layouts import GpuLayouts, LayoutCheck
from varlen_graphs.options.verify import Verify
from varlen_graphs.routing.costs import Costs
from varlen_graphs.routing.enabled import EnabledBudgets
from varlen_graphs.routing.eviction import MemoryLimit
from varlen_graphs.routing.router import OnMiss, Router
from varlen_graphs.stats import Stats
from varlen_graphs.verify.capture_check import CaptureCheck
from varlen_graphs.verify.eager_checks import check_claim
from varlen_graphs.verify.in_service import InService


def check_options(
    module: object, spec: object, forward: object, method: object, backend: object, pool: object, on_miss: object,
    eager_if: object, capture: object,
) -> None:  # fmt: skip
    """Check the types and choices of an encoder's options.

    Raises:
        SpecError: One of them is something else.
    """
    if not isinstance(module, nn.Module) or not isinstance(spec, BufferSpec):
        raise SpecError(
            f"GraphedEncoder got a {type(module).__name__} as module and a {type(spec).__name__} as buffer_spec: "
            "expected a torch.nn.Module and a BufferSpec"
        )
    for name, value, allowed in (("backend", backend, get_args(BackendName)), ("on_miss", on_miss, get_args(OnMiss))):
        if not isinstance(value, str) or value not in allowed:
            raise SpecError(f"{name}={quoted(value)}: expected one of {', '.join(map(repr, allowed))}")
    for name, function in (("forward", forward), ("eager_if", eager_if)):
        if function is not None and not callable(function):
            raise SpecError(f"{name}={quoted(function)}: expected a function, or None")
    if not callable(getattr(module, method, None) if isinstance(method, str) else None):
        raise SpecError(
            f"method={quoted(method)}: expected the name of a method of {type(module).__name__}, such as "
            "'forward_features'"
        )
    if pool is not None and not isinstance(pool, Pool):
        raise SpecError(f"pool={quoted(pool)}: expected a Pool, such as vg.options.Pool(), or None")
    if not isinstance(capture, Capture):
        raise SpecError(f"capture={capture!r}: expected a Capture, such as vg.options.Capture(lazy=True)")


def assemble(
    module: nn.Module, budgets: Budgets | None, spec: BufferSpec, *, forward: Callable[..., Any] | None, method: str,
    backend: BackendName, pool: Pool | None, on_miss: OnMiss, layouts: LayoutCheck | GpuLayouts,
    eager_if: EagerIf | None, memory: int | str | None, capture: Capture, verify: Verify,
) -> tuple[Executor, CaptureQueue, WarmStart]:  # fmt: skip
    """Make the parts of an encoder from checked options: the path of a call, captures between calls, the file."""
    chosen = default_budgets(spec.layout) if budgets is None else budgets
    given = chosen.budgets if isinstance(chosen, DefaultBudgets) else chosen
    resolved = resolve_budgets(given, spec.row_multiple, spec.usage)
    check_budgets(spec, resolved)
    pool = Pool() if pool is None else pool
    memory = given.memory if memory is None and isinstance(given, Ladder) else memory
    stats = Stats()
    enabled = EnabledBudgets(Costs.in_rows(resolved), resolved if isinstance(chosen, DefaultBudgets) else ())
    limit = None if memory is None else MemoryLimit(memory, enabled, stats)
    signature = Signature(module, forward, spec, eager_if, method)
    start_triton(module.parameters())
    runs = Forward(module, forward, spec, signature, capture.compile, method)
    mode = Mode(module, backend, pool, runs.beside)
    store = GraphStore(runs, mode, pool, enabled, limit, capture)
    if verify.at_capture:
        runs.verdict.verified = {}
        if forward is not None and spec.declared_by == "user":
            runs.check_claim = partial(check_claim, runs, verify.tolerance)

    layouts = layouts if isinstance(layouts, GpuLayouts) else GpuLayouts(layouts)
    queue = CaptureQueue(store, stats, capture)
    routes = spec, enabled, on_miss, layouts.min_segment_rows
    router = Router(*routes) if queue.requests is None else LazyRouter(*routes, queue.requests)
    verification = InService(verify) if verify.at_capture or verify.calls else None
    executor = Executor(signature, mode, router, store, stats, layouts=layouts, verification=verification)
    executor.exact = queue.exact
    if verify.at_capture:
        store.check_graphs = CaptureCheck(executor, verify)
    identity = capture.compile, method, getattr(forward, "__qualname__", None)
    warm_start = WarmStart(executor, identity, capture)
    warm_start.load()
    return executor, queue, warm_start
