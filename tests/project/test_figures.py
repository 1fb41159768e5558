"""The figures in the sentences of pages are those of the JSON in docs/benchmarks, as the tables are."""

import json
import math
import re
import statistics
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

import varlen_graphs as vg
from benchmarks.page import eager, milliseconds
from benchmarks.traces import SINGLES, TRACES

ROOT = Path(__file__).parent.parent.parent
UNIT = re.compile(r"\d[\d.,]* (?:ms|us|s|GiB|MiB|%|times)(?!\w)")
"""A figure that something was measured for."""


@cache
def result(name):
    return json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text())


def row(name, rows="rows", **keys):
    """The first row of a result with these values."""
    return next(each for each in result(name)[rows] if all(each[key] == value for key, value in keys.items()))


def tower(system):
    """The 8B tower: a call of one small image, of four images and of one large image."""
    times = (milliseconds(result("qwen3_vl_8b"), name) for name in ("224x224", "4 of 448x448", "1344x1344"))
    return [eager(each) if system == "eager" else each[system] for each in times]


HOSTS = "qwen3_vl_8b", "qwen3_vl_8b_again", "qwen3_vl_8b_third"
"""The 8B tower on three hosts."""


def over_exact_graphs():
    """Graphed calls over exact graphs of the same forward, by input, on three hosts."""
    ratios = []
    for name in HOSTS:
        for one in (one for one in result(name)["rows"] if one["system"] == "oracle_core" and "failed" not in one):
            middle = statistics.median if one["input"] in SINGLES else statistics.fmean
            ratios.append(middle(one["beside_ms"]) / middle(one["wall_ms"]))
    return ratios


def gib(part):
    """The least and the most memory of graphs, on three hosts."""
    return ends([result(name)["systems"]["ours"][part] for name in HOSTS])


def over_recordings():
    times = [milliseconds(result("qwen3_vl_8b_recorded"), name) for name in SINGLES]
    return [each["compile_reduce_overhead"] / each["ours"] for each in times]


def recipe_gains():
    """What a recipe gains over the inferred declaration, by tower."""
    rows = groupby(result("families_automatic")["rows"], key=lambda one: one["family"])
    ratios = ([one["automatic_ms"] / one["graphed_ms"] for one in each] for _, each in rows)
    return [math.exp(statistics.fmean(map(math.log, each))) for each in ratios]


def padding():
    """Percent of the replayed rows that are padding in default budgets, by trace."""
    return [100 * share for share in row("ladder", step=vg.Ladder().step)["padding"].values()]


def ends(values):
    return min(values), max(values)


def engines():
    """How much faster encoder calls are than in the own graphs of vLLM and SGLang: the least and the most."""
    vllm, sglang = result("vllm"), result("sglang")
    return (
        min(vllm["own_least"], vllm["fine_least"], sglang["least"]),
        max(vllm["own_most"], vllm["fine_most"], sglang["most"]),
    )


def vllm_and_sglang():
    vllm, sglang = result("vllm"), result("sglang")
    own = [vllm[f"own_{key}"] for key in ("encoder_ratio", "least", "most")]
    return *own, sglang["encoder_ratio"], sglang["least"], sglang["most"]


def first_tokens(images):
    one = row("generate", prompt=f"{images} of 448x448")
    return one["wrapped_ms"], one["model_ms"]


def gpus(system, name):
    return statistics.median(row("parallel_2", system=system, input=name)["wall_ms"])


def attention_ratios(system):
    """What a system takes over `varlen_attention` with 256 slots, by row."""
    return [one[f"{system}_us"] / one["ours_256_us"] for one in result("attention")["rows"] if f"{system}_us" in one]


def first_steps(module, system):
    """Seconds of the first calls of a module, of all of its inputs."""
    rows = result("steps")["rows"]
    return sum(one["first_s"] for one in rows if (one["module"], one["system"]) == (module, system))


SD3 = "Stable Diffusion 3 medium"
OURS = result("qwen3_vl_8b")["systems"]["ours"]
EAGER = result("qwen3_vl_8b")["systems"]["eager_varlen"]
SERVICES = result("deployment")["service"]
TIMM = row("modules", input="1 of 224x224")
TIMM_SIGLIP = row("modules", module="timm SigLIP so400m/14", input="16 of 384x384")
NAFLEX = row("families", family="SigLIP 2 so400m, NaFlex", input="224x224")
SERVED = {"served": "Qwen3-VL-8B's tower", "clients": 8}

FIGURES = {
    "README.md": [
        ("| graphed | {:.1f} | {:.1f} | {:.1f} |", tower("ours")),
        ("faster of FlashAttention 2 and sdpa | {:.1f} | {:.1f} | {:.1f} |", tower("eager")),
        ("| torch.compile | {:.1f} | {:.1f} | {:.1f} |", tower("compile_dynamic")),
        ("without padding or copies | {:.1f} | {:.1f} | {:.1f} |", tower("oracle_blocks")),
        ("returns its first token after {:.0f} ms instead of {:.0f}", first_tokens(4)),
        ("encoder calls are {:.1f} to {:.0f} times as fast as in their own CUDA graphs", engines()),
        ("{:.0f} to {:.0f} % of the rows are padding", ends(padding())),
    ],
    "docs/benchmarks.md": [
        ("{:.2f} to {:.2f} times an exact graph", ends(over_exact_graphs())),
        ("after recording each layout: {:.1f} to {:.1f} times as long", ends(over_recordings())),
        (
            "encoder calls are {:.2f} times as fast as in vLLM's own graphs ({:.2f} to {:.2f}; a1a0bb90), {:.2f} times as"
            " fast as in SGLang's ({:.2f} to {:.2f};",
            vllm_and_sglang(),
        ),
        ("first token after {:.0f} ms instead of {:.0f} with one image", first_tokens(1)),
        ("{:.0f} ms instead of {:.0f} with four", first_tokens(4)),
        ("Recipes are {:.2f} to {:.2f} times as fast", ends(recipe_gains())),
        (
            "On a slow host: {:.1f} s for all graphs",
            [result("qwen3_vl_8b_third")["systems"]["ours"]["capture_s"]],
        ),
        (
            "Checking them: {:.1f} of {:.1f} s",
            [row("proof", capture="with the proof")[key] for key in ("proven_s", "total_s")],
        ),
        (
            "three batch sizes: {:.1f} s; with torch.compile {:.1f} s",
            [TIMM["wrapped_start_s"], TIMM["compiled_start_s"]],
        ),
        (
            "until each has answered: {:.1f} s, with nothing compiled {:.1f} s",
            [SERVICES[1]["start_s"], SERVICES[0]["start_s"]],
        ),
        (
            "All graphs take {:.2f} to {:.2f} GiB, that of the largest budget alone {:.2f} to {:.2f}",
            [*gib("capture_gib"), *gib("largest_gib")],
        ),
        (
            "holds {:.2f} GiB in all; calls peak at {:.2f} GiB, eager ones at {:.2f}",
            [OURS["held_gib"], OURS["peak_gib"], EAGER["peak_gib"]],
        ),
        ("Padding: {:.1f} to {:.1f} % of the rows of traces", ends(padding())),
        (
            "with `Capture(compile=True)` {:.0f}, ready for three resolutions after {:.0f} s instead of {:.0f}",
            [
                row("steps", module=SD3, system="fused", input="1024x1024")["third_ms"],
                first_steps(SD3, "fused"),
                row("modules", module=SD3, input="1024x1024")["compiled_start_s"],
            ],
        ),
        ("is ready after {:.0f} s", [first_steps("Flux.1 dev", "wrapped")]),
        (
            "{:.1f} % of one image of 224x224",
            [100 * row("qwen3_vl_8b", system="ours", input="224x224")["padding"]],
        ),
        (
            "share a pool take {:.2f} GiB, with own pools {:.2f}",
            [SERVICES[1]["pools_gib"], SERVICES[2]["pools_gib"]],
        ),
        (
            "SigLIP take {:.1f} ms, with torch.compile {:.1f}",
            [TIMM_SIGLIP["wrapped_ms"], TIMM_SIGLIP["compiled_ms"]],
        ),
        (
            "the host needs {:.2f} ms a call, {:.2f} for padded batches",
            [row("host", layout=name)["median_us"] / 1e3 for name in ("list", "padded batch, mask on the CPU")],
        ),
        (
            "SigLIP 2 takes {:.2f} ms, an exact graph {:.2f}",
            [NAFLEX["graphed_ms"], NAFLEX["exact_ms"]],
        ),
        (
            "the P99 of the 8B tower rose from {:.0f} to {:.0f} ms",
            [row("serving", **SERVED, system=system)["p99_ms"] for system in ("as it is", "wrapped")],
        ),
        (
            "one image takes {:.2f} ms on two, {:.2f} on one",
            [gpus("parallel", "1 of 448x448"), gpus("one", "1 of 448x448")],
        ),
        (
            "answer {:.2f} times the requests of one, with MPS {:.2f}",
            [each["together_per_s"] / each["alone_per_s"] for each in result("deployment")["replicas"]],
        ),
        (
            "NaN in one segment reaches another; faster in {} of 21 cases",
            [sum(ratio < 1 for ratio in attention_ratios("fa3_256"))],
        ),
        (
            "faster in {} of 21 cases, up to {:.0f} times as long for short segments",
            [sum(ratio < 1 for ratio in attention_ratios("fa4_256")), max(attention_ratios("fa4_256"))],
        ),
    ],
}
"""Sentences of pages, and their figures by the JSON."""


def words(page):
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize(
    ("page", "sentence", "figures"),
    [(page, *pair) for page, pairs in FIGURES.items() for pair in pairs],
    ids=lambda value: str(value)[:60],
)
def test_a_page_states_the_figures_of_the_results(page, sentence, figures):
    assert sentence.format(*figures) in words(page)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_no_figure_of_a_front_page_is_without_a_result(page):
    text = words(page)
    for sentence, figures in FIGURES.get(page, []):
        text = text.replace(sentence.format(*figures), "")
    assert not UNIT.findall(text), "add the sentence to FIGURES"


def test_all_graphs_take_hardly_more_memory_than_the_largest():
    assert f"{OURS['budgets']} budgets up to 16,384 rows take hardly more memory than the largest alone" in words(
        "README.md"
    )
    assert OURS["largest_rows"] == 16384
    assert statistics.geometric_mean(result(name)["systems"]["ours"]["gib_to_largest"] for name in HOSTS) < 1.05


def test_compiling_the_fused_forward_of_a_tower_gains_nothing():
    times = [milliseconds(result("qwen3_vl_8b_third"), name) for name in (*SINGLES, *TRACES)]
    assert statistics.geometric_mean(each["ours_compile"] / each["ours"] for each in times) > 0.97
