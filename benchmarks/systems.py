"""Ways to run the vision tower of Qwen3-VL: the tower itself, the compiler, oracles, and ours.

A system prepares a call and gives back what runs it. All of them get their rows on the GPU.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import varlen_graphs as vg
from benchmarks.common import capture, collect, free_gib
from benchmarks.traces import Layout, rows_of
from varlen_graphs.attention.timing import measuring

FLASH2 = "benchmark_flash2"
"""FlashAttention 2 by its own name: what `use_attention` runs may be our own kernel, which is no baseline."""

TOWERS = {
    "2b": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "8b": {"out_hidden_size": 4096},
}  # fmt: skip
"""Towers by the size of the model they belong to: what differs from the defaults of transformers."""

ROW = 1536
"""Numbers in a patch of 16 x 16 pixels, two frames, three colours."""

COMPILED_FIRST: Layout = ((2, 14, 14), (1, 20, 28), (1, 14, 16))
"""What is compiled with: no two sizes are the same, or the compiler would take them for one."""

FEW_LAYOUTS = 4
"""Layouts of a trace for a system that records each of them."""


@dataclass(frozen=True)
class Call:
    """One call: rows `[rows, 1536]` on the GPU, and the items on the host and on the GPU."""

    rows: Tensor
    layout: Layout
    grid: Tensor


@dataclass
class System:
    """One way to run the tower.

    Attributes:
        prepare: From a call to what runs it.
        attention: The name of the tower's attention while this system runs.
        ahead: Untimed runs ahead of the timing of each call: an oracle has been replayed, a recording has been made.
        most_layouts: How many layouts of a trace it is asked for at most; `None` is all of them.
        between: What is run, untimed, ahead of every timed run of one and the same layout.
        beside: From a call to what is timed in turn with it, so that both meet the chip in the same state.
        build: What making it cost: seconds, GiB.
        encoder: The encoder, if it is ours.
        compiled_graphs: How many graphs the compiler has made so far, if it is at work.
    """

    prepare: Callable[[Call], Callable[[], Any]]
    attention: str = FLASH2
    ahead: int = 0
    most_layouts: int | None = None
    between: Callable[[], Any] | None = None
    beside: Callable[[Call], Callable[[], Any]] | None = None
    build: dict[str, Any] = field(default_factory=dict)
    encoder: vg.GraphedEncoder | None = None
    compiled_graphs: Callable[[], int] | None = None


def make_call(layout: Layout, source: Tensor | None = None, offset: int = 0) -> Call:
    """A call with random rows, or with a part of `source` `[rows, 1536]`, on the GPU."""
    count = rows_of(layout)
    rows = torch.randn(count, ROW, device="cuda", dtype=torch.bfloat16) if source is None else source[offset:][:count]
    return Call(rows, layout, torch.tensor(layout, device="cuda"))


def make_tower(size: str, dtype: torch.dtype) -> Any:
    """A tower of the 2B or 8B model with random weights, on the GPU. `inv_freq` stays float32."""
    torch.manual_seed(0)
    return Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**TOWERS[size]), dtype=dtype).cuda().eval()


def tensors(output: Any) -> list[Tensor]:
    """All tensors of the tower's output."""
    return [output.last_hidden_state, output.pooler_output, *output.deepstack_features]


@contextmanager
def attention(tower: Any, name: str) -> Iterator[None]:
    """Run the tower on an attention of this name."""
    before = tower.config._attn_implementation
    tower.config._attn_implementation = name
    try:
        yield
    finally:
        tower.config._attn_implementation = before


def flash2(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[Any, None]:
    """FlashAttention 2 of torch with the signature of transformers' attention functions."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out: Any = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling)
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(FLASH2, flash2)


# Baselines


def run_eager(tower: Any, call: Call) -> Any:
    """The tower as it is."""
    with torch.no_grad():
        return tower(call.rows, grid_thw=call.grid)


def metadata(tower: Any, grid: Tensor) -> dict[str, Any]:
    """Everything the tower computes from the grid on the host, as the keyword arguments that replace it.

    Transformers offers them for exactly this: what they are computed by cannot be traced or captured.
    """
    from transformers import vision_utils

    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    cu_seqlens, max_seqlen = vision_utils.get_vision_attention_seqlens(grid, tower.config)
    return {
        "interp_indices": indices,
        "interp_weights": weights,
        "position_ids": vision_utils.get_vision_position_ids(grid, tower.spatial_merge_size),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
    }


def compile_tower(tower: Any, **options: Any) -> System:
    """The tower under torch.compile with dynamic shapes, its metadata computed ahead of it in every call.

    Compiled once, for the rows and segments of any call.
    """
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(tower, dynamic=True, **options)
    unread = torch.ones(1, 3, dtype=torch.int64, device=tower.device)  # where metadata comes along, no one reads it

    def run(call: Call) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # means nothing without recordings
        with torch.no_grad():
            return compiled(call.rows, grid_thw=unread, **metadata(tower, call.grid))

    start = time.perf_counter()
    with attention(tower, FLASH2):
        run(make_call(COMPILED_FIRST))
    torch.cuda.synchronize()
    build = {"compile_s": time.perf_counter() - start}
    return System(
        prepare=lambda call: partial(run, call),
        build=build,
        compiled_graphs=lambda: counters["stats"]["unique_graphs"],
    )


def compile_recorded(tower: Any) -> System:
    """The same with a CUDA graph recorded for each layout, timed once it has its recording."""
    system = compile_tower(tower, mode="reduce-overhead")
    system.ahead, system.most_layouts = 3, FEW_LAYOUTS  # a warm-up, the recording, a replay
    return system


# Oracles: what an exact graph of each layout would take, if it were there already


class Replay:
    """A run captured by itself: calling it replays the graph and returns the static output."""

    def __init__(self, run: Callable[[], Any], kernels_alone: bool = False) -> None:
        self._graph, self._output = capture(run, kernels_alone=kernels_alone)
        self._run = run  # holds the tensors that the graph reads

    def __call__(self) -> Any:
        """Replay."""
        self._graph.replay()
        return self._output


def oracle_blocks(tower: Any, layouts: int) -> System:
    """The unmodified tower at the exact shape, its metadata computed ahead: nothing but the replay is timed."""

    def prepare(call: Call) -> Callable[[], Any]:
        arguments = metadata(tower, call.grid)
        return Replay(lambda: tower(call.rows, grid_thw=call.grid, **arguments))

    return System(prepare, ahead=2, most_layouts=layouts)


def oracle_core(encoder: vg.GraphedEncoder, layouts: int) -> System:
    """Our own forward at the exact shape: no padding, nothing copied in or out, nothing but the replay is timed.

    The encoder itself is timed beside it.
    """

    def prepare(call: Call) -> Callable[[], Any]:
        # No public call replays without copying rows in and outputs out, so this takes the encoder's forward itself,
        # at the budget an eager call would use, with the item table resident as it is inside a graph.
        layout, spec = vg.layouts.Layout(call.layout), encoder.spec
        values, budget = torch.tensor(layout.items, device=call.rows.device), spec.exact_budget(layout)

        def forward() -> Any:
            table = vg.layouts.ItemTable(values, budget, spec.layout)
            return encoder.executor.forward(call.rows, table, given={}, static_args={})

        with measuring():  # the faster attention, as in captures
            forward()
        return Replay(forward, kernels_alone=True)

    def beside(call: Call) -> Callable[[], Any]:
        return partial(encoder, call.rows, grid_thw=call.grid)

    return System(prepare, ahead=2, most_layouts=layouts, beside=beside)


# Ours

SMALLEST_FRAME = 64
"""Rows of the smallest frame of any input here, or fewer."""


def graphed(tower: Any, *, grid_on_host: bool, **options: Any) -> System:
    """Our encoder with the default ladder; every graph has been replayed once."""
    if not grid_on_host:
        options["layouts"] = vg.options.GpuLayouts(
            min_segment_rows=SMALLEST_FRAME
        )  # so that the host need not see the items
    encoder, build = capture_ladder(tower, None, **options)
    zeros = torch.zeros(encoder.budgets[-1].rows, ROW, device="cuda", dtype=torch.bfloat16)
    for budget in encoder.budgets:
        encoder(zeros[: budget.rows], grid_thw=[(1, 2, budget.rows // 2)])

    def prepare(call: Call) -> Callable[[], Any]:
        return partial(encoder, call.rows, grid_thw=torch.tensor(call.layout) if grid_on_host else call.grid)

    # Where one layout is timed again and again, another one comes between, so that nothing of the last call helps.
    other = [(1, 2, 4), (1, 4, 2)]
    return System(prepare, between=lambda: encoder(zeros[:16], grid_thw=other), build=build, encoder=encoder)


def capture_ladder(tower: Any, budgets: Any, **options: Any) -> tuple[vg.GraphedEncoder, dict[str, Any]]:
    """Capture budgets twice: the first time kernels are compiled too, the second time gives the seconds and the GiB."""
    encoder = vg.recipes.qwen3_vl(tower, budgets, **options)
    start = time.perf_counter()
    encoder.capture()
    torch.cuda.synchronize()
    cold = time.perf_counter() - start
    encoder.release()
    collect()
    before, start = free_gib(), time.perf_counter()
    encoder.capture()
    torch.cuda.synchronize()
    warm = time.perf_counter() - start
    collect()
    seconds = encoder.executor.store.seconds  # of the second capture; `encoder.report()` has them as text
    compiled = encoder.executor.forward.compiled
    return encoder, {
        **({"compile_s": compiled.seconds} if compiled else {}),
        "timing_s": seconds.get("timed", 0.0),
        "replay_ms": {budget.rows: cost for budget, cost in sorted(encoder.costs.replays.items())},
        "budgets": len(encoder.budgets),
        "largest_rows": encoder.budgets[-1].rows,
        "capture_cold_s": cold,
        "capture_s": warm - seconds.get("timed", 0.0),
        "capture_gib": before - free_gib(),
    }


def padding_share(encoder: vg.GraphedEncoder, calls: list[Call]) -> dict[str, Any]:
    """Share of padding in the replayed rows of some calls, 0 to 1, and how many runs were eager."""
    stats = encoder.stats
    rows, padding, eager = stats.rows, stats.padding, stats.eager.total()
    for call in calls:
        encoder(call.rows, grid_thw=call.grid)
    rows, padding = stats.rows - rows, stats.padding - padding
    return {"padding": padding / max(1, rows + padding), "eager_runs": stats.eager.total() - eager}
