"""Wall milliseconds of encoders that `vg.wrap` understands by itself: eager, compiled, exact graph, and wrapped.

Run with `python -m benchmarks.encoders`. Real sizes, random weights, bfloat16, inputs on the GPU, a synchronize on both
sides of every call, systems in turn, each with a call that is not timed before the one that is, whose end the host
polls. A system is timed only if it is about as close to a float32 copy of the model as the model's own run. Texts have
lognormal lengths of 40 tokens on average; their batches come padded, with a mask.

- *eager*: the model of transformers on sdpa.
- *compiled*: `torch.compile(model, dynamic=True)`, after a call of another shape.
- *exact*: eager captured at the exact shape, the replay alone. Where that fails, the reason stands in its place.
- *padded*: of texts, graphs of padded batches, with a mask computed in the graph.
- *wrapped*: `vg.wrap(model)` with the default budgets. Of these and of *padded*, those are captured that calls need.
- *fused*: of the largest batch of texts of most models, the same with `capture=vg.options.Capture(compile=True)`.

The milliseconds of one of several calls in a row, where the host is ahead of the GPU, end in `_in_row_ms`.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import varlen_graphs as vg
from benchmarks.common import (
    capture,
    check,
    distance,
    gpu_microseconds,
    grow_cache,
    measure_in_turn,
    reason,
    report,
)

MEAN_TOKENS, SPREAD = 40, 0.8
LONGEST = 512

IN_ROW = 8
"""Calls in a row, where the host prepares one while the GPU computes the one before."""

Call = dict[str, Tensor]
Run = Callable[[], Any]


class Model(NamedTuple):
    """A model of transformers at its real size: its class, its configuration, and what makes a call of a batch."""

    kind: str
    config: str
    sizes: dict[str, Any]
    call: Callable[[Any, int], Call]
    batches: tuple[int, ...]


def noise(*shape: int) -> Tensor:
    """Random numbers on the GPU, made on the host: a failed capture may have broken the generator of the GPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).cuda()


def images(config: Any, batch: int) -> Call:
    """Square images of the model's own size."""
    size = config.image_size
    side = size if isinstance(size, int) else size[0]
    return {"pixel_values": noise(batch, 3, side, side)}


def pictures(config: Any, batch: int) -> Call:
    """Images of several sizes, padded to the largest."""
    sizes = [(336, 448), (512, 512), (1024, 768), (256, 640)]
    own = [sizes[at % len(sizes)] for at in range(batch)]
    height, width = (max(side) for side in zip(*own, strict=True))
    return {
        "pixel_values": noise(batch, 3, height, width),
        "image_sizes": torch.tensor(own, device="cuda"),
    }


def sounds(config: Any, batch: int) -> Call:
    """Spectrograms of 30 seconds."""
    return {"input_features": noise(batch, config.num_mel_bins, 3000)}


def texts(config: Any, batch: int) -> Call:
    """Token ids of texts of lognormal lengths, padded to the longest, and their mask."""
    generator = torch.Generator().manual_seed(batch)
    mean = torch.tensor(float(MEAN_TOKENS)).log() - SPREAD**2 / 2
    lengths = (torch.randn(batch, generator=generator) * SPREAD + mean).exp().round().clamp(3, LONGEST).long()
    if batch == 1:
        lengths[:] = MEAN_TOKENS
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(1000, 20000, mask.shape, generator=generator) * mask
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


TILES, FEW, TEXTS = (1, 4, 8, 32), (1, 4), (1, 8, 32)

MODELS = {
    "SigLIP so400m": Model(
        "SiglipVisionModel", "SiglipVisionConfig",
        {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 384, "patch_size": 14,
        },
        images, TILES,
    ),
    "InternVL 300M": Model("InternVLVisionModel", "InternVLVisionConfig", {}, images, TILES),
    "Pixtral 12B": Model("PixtralVisionModel", "PixtralVisionConfig", {}, pictures, FEW),
    "Whisper large v3": Model(
        "WhisperEncoder", "WhisperConfig",
        {
            "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
            "num_mel_bins": 128,
        },
        sounds, FEW,
    ),
    "MiniLM-L6": Model(
        "BertModel", "BertConfig",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
        texts, TEXTS,
    ),
    "BERT-base": Model("BertModel", "BertConfig", {}, texts, TEXTS),
    "ModernBERT-base": Model("ModernBertModel", "ModernBertConfig", {}, texts, TEXTS),
    "Qwen3-Embedding-0.6B": Model(
        "Qwen3Model", "Qwen3Config",
        {
            "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151669, "use_cache": False,
        },
        texts, TEXTS,
    ),
}  # fmt: skip


FUSED = {"MiniLM-L6", "BERT-base", "ModernBERT-base"}
"""Models of which the largest batch is measured fused, too; the largest one compiles for minutes."""


def build(model: Model, dtype: torch.dtype) -> Any:
    """The model with random weights, on the GPU."""
    torch.manual_seed(0)
    config = getattr(transformers, model.config)(**model.sizes)
    kind = getattr(transformers, model.kind, None) or _encoder_of(model.kind)
    return kind._from_config(config, dtype=dtype).cuda().eval()


def _encoder_of(name: str) -> Any:
    from transformers.models.whisper import modeling_whisper

    return getattr(modeling_whisper, name)


def real_rows(output: Any, call: Call) -> list[Tensor]:
    """The output of a call without padding."""
    rows = output.last_hidden_state
    return [rows[call["attention_mask"].bool()] if "attention_mask" in call else rows]


def padded_encoder(model: Any) -> vg.GraphedEncoder:
    """Graphs of padded batches of texts, with a mask computed in the graph."""

    def forward(model: Any, input_ids: Tensor, mask: Tensor) -> Any:
        return model(input_ids, attention_mask=mask)

    causal = "Qwen3" in type(model).__name__
    fields = {"last_hidden_state": vg.outputs.Rows()}
    if getattr(model, "pooler", None) is not None:
        fields["pooler_output"] = vg.outputs.Items()  # type: ignore[assignment]
    spec = vg.BufferSpec(
        vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64),
        vg.Mask("attention_mask"),
        [vg.buffers.AttentionMask("mask", causal=causal, dtype=torch.bool)],
        vg.outputs.Fields(**fields),
    )
    ladder = vg.budgets.PaddedLadder(length=LONGEST, min_length=32)
    return vg.GraphedEncoder(model, ladder, spec, forward=forward, capture=vg.options.Capture(lazy=True))


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """A call with its numbers, not its token ids, in a dtype."""
    return {name: part.to(dtype) if part.is_floating_point() else part for name, part in call.items()}


class Prepared(NamedTuple):
    """A model, its calls by their batch sizes, and the systems that take long to compile, ready to be called."""

    name: str
    model: Any
    calls: dict[int, Call]
    compiled: Any
    fused: Any


def run(name: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of a model."""
    torch.cuda.empty_cache()  # of the one before
    return rows(prepare(name), repeats)


def prepare(name: str) -> Prepared:
    """Build a model and compile it. May run beside other programs, which would spoil times."""
    about = MODELS[name]
    model = build(about, torch.bfloat16)
    calls = {batch: in_dtype(about.call(model.config, batch), torch.bfloat16) for batch in about.batches}
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), dynamic=True)
    with torch.no_grad():
        for call in (in_dtype(about.call(model.config, 3), torch.bfloat16), *calls.values()):
            compiled(**call)
    fused = None
    if name in FUSED:
        batch = max(calls)
        budget = vg.budgets.Budget(-(-int(calls[batch]["attention_mask"].sum()) // 128) * 128, items=2 * batch)
        fused = vg.wrap(copy.deepcopy(model), [budget], capture=vg.options.Capture(compile=True))
        with torch.no_grad():
            fused(**calls[batch])
    return Prepared(name, model, calls, compiled, fused)


def rows(prepared: Prepared, repeats: int) -> list[dict[str, Any]]:
    """The rows of a model. All systems are captured and checked before any is timed.

    Captures time their graphs, to choose between them: nothing else may run on the machine.
    """
    name, model, calls, compiled, fused = prepared
    reference = copy.deepcopy(model).float()
    wrapped = vg.wrap(copy.deepcopy(model), capture=vg.options.Capture(lazy=True))
    encoder = next(iter(vg.encoders(wrapped).values()))
    is_text = MODELS[name].call is texts
    padded = padded_encoder(copy.deepcopy(model)) if is_text and name != "ModernBERT-base" else None
    found = []
    for batch, call in calls.items():
        with torch.no_grad():
            expected = real_rows(reference(**in_dtype(call, torch.float32)), call)
            for lazy in filter(None, [wrapped, padded]):
                lazy(**call)
        for lazy in filter(None, [encoder, padded]):
            lazy.capture_pending(None)
        last = fused if batch == max(calls) else None
        systems = {"eager": model, "compiled": compiled, "padded": padded, "wrapped": wrapped, "fused": last}
        row, runs = check_call({n: s for n, s in systems.items() if s is not None}, call, expected)
        row |= {"eager_calls": dict(encoder.stats.eager), "replays": replays(encoder, runs)}
        found.append(({"model": name, "batch": batch, "tokens": tokens(call)} | row, runs))
    del reference
    grow_cache()
    return [row | measure(runs, repeats) for row, runs in found]


def replays(encoder: Any, runs: dict[str, Run]) -> dict[str, int]:
    """Number of replays that a call takes, by the rows of their budgets."""
    before = encoder.stats.replays.copy()
    if "wrapped" in runs:
        runs["wrapped"]()
    return {str(budget.rows): count for budget, count in (encoder.stats.replays - before).items()}


def tokens(call: Call) -> str | None:
    """Real tokens and all tokens of a batch of texts."""
    mask = call.get("attention_mask")
    return None if mask is None else f"{int(mask.sum())} of {mask.numel()}"


def check_call(systems: dict[str, Any], call: Call, expected: list[Tensor]) -> tuple[dict[str, Any], dict[str, Run]]:
    """Check the systems on one call; return their errors and failures, and what to time of those that are right."""
    row: dict[str, Any] = {}
    runs: dict[str, Run] = {}

    def caller(system: Any) -> Run:
        def one() -> Any:
            with torch.no_grad():
                return system(**call)

        return one

    def checked(name: str, once: Run) -> None:
        try:
            row[f"{name}_error"] = distance(real_rows(once(), call), expected)
            check(row[f"{name}_error"], row["eager_error"])
        except Exception as failure:
            row[f"{name}_failed"] = reason(failure)
        else:
            runs[name] = once

    def exact() -> Run:
        graph, output = capture(caller(systems["eager"]))

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    for name, system in systems.items():
        checked(name, caller(system))
    try:
        checked("exact", exact())
        row["kernels_ms"] = gpu_microseconds(caller(systems["eager"]), launches=3) / 1e3
    except Exception as failure:  # the model cannot be captured
        row["exact_failed"] = reason(failure)
    return row, runs


def measure(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Milliseconds of each system, in turn: until the GPU is done, until the host is, and of calls in a row."""
    row = {}
    for each in runs.values():
        for _ in range(3):
            each()
    for name, (walls, hosts) in zip(runs, measure_in_turn([*runs.values()], repeats, 20, warm=True), strict=True):
        row[f"{name}_ms"] = statistics.median(walls)
        row[f"{name}_host_ms"] = statistics.median(hosts)
    several = [partial(in_row, each) for each in runs.values()]
    for name, (walls, _) in zip(runs, measure_in_turn(several, repeats // 2, 20), strict=True):
        row[f"{name}_in_row_ms"] = statistics.median(walls) / IN_ROW
    return row


def in_row(run: Run) -> None:
    """Make several calls, without waiting for the GPU between them."""
    for _ in range(IN_ROW):
        run()


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    found = (row for name in options.models for row in run(name, options.repeats))
    times = [f"{name}_ms" for name in ("kernels", "eager", "compiled", "exact", "padded", "wrapped", "fused")]
    report(found, ("model", "batch", "tokens", *times), options.json)


if __name__ == "__main__":
    main()
