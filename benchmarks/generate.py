"""Milliseconds to the first token of a whole Qwen3-VL-2B model, as it is and wrapped.

Random weights, bfloat16, attention by sdpa. Nothing is timed unless both give about the same logits. *same tokens*: how
many of 8 generated tokens agree until the first that does not; logits of random weights are often nearly tied. After
`unwrap` the logits are those of before, bit for bit.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

import varlen_graphs as vg
from benchmarks.common import LARGEST_ERROR, check, distance, facts, headline, measure, table, write_json
from benchmarks.systems import ROW, TOWERS
from benchmarks.traces import Layout, image, rows_of

IMAGE, START, END = 151_655, 151_652, 151_653

TEXT = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
}  # fmt: skip
"""The language model of Qwen3-VL-2B."""

PROMPTS: dict[str, Layout] = {"1 of 448x448": (image(448),), "4 of 448x448": (image(448),) * 4}
WORDS, TOKENS = 32, 8
"""Words in front of the images, and tokens generated for comparison."""


def make_model() -> Any:
    """The whole model with random weights, on the GPU."""
    config = Qwen3VLConfig(
        text_config=TEXT,
        vision_config=TOWERS["2b"],
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()


def make_prompt(layout: Layout) -> dict[str, Tensor]:
    """What a processor makes of some images and words."""
    ids = list(range(1, WORDS))
    for _, h, w in layout:
        ids += [START, *[IMAGE] * (h * w // 4), END]
    tokens = torch.tensor([[*ids, 5]], device="cuda")
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE).long(),
        "pixel_values": torch.randn(rows_of(layout), ROW, device="cuda", dtype=torch.bfloat16),
        "image_grid_thw": torch.tensor(layout, device="cuda"),
    }


def generate(model: Any, prompt: dict[str, Tensor], tokens: int) -> Tensor:
    """So many tokens, greedily."""
    generated: Tensor = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
    return generated[:, prompt["input_ids"].shape[1] :]


def first_token_ms(model: Any, prompt: dict[str, Tensor], repeats: int) -> float:
    """The median time to the first token."""
    for _ in range(3):
        generate(model, prompt, 1)
    return statistics.median(measure(lambda: generate(model, prompt, 1), repeats, seconds=30)[0])


@torch.no_grad()
def logits(model: Any, prompt: dict[str, Tensor]) -> Tensor:
    """What the first token is chosen by."""
    chosen_by: Tensor = model(**prompt, logits_to_keep=1).logits
    return chosen_by


def agreeing(ours: Tensor, theirs: Tensor) -> int:
    """How many tokens are the same until the first that is not."""
    return int((ours == theirs).long().cumprod(-1).sum())


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {**facts(), "rows": []}
    print(headline(result) + "\n")
    model = make_model()
    for name, layout in PROMPTS.items():
        prompt = make_prompt(layout)
        seen, tokens = logits(model, prompt), generate(model, prompt, TOKENS)
        row = {"prompt": name, "tokens": prompt["input_ids"].shape[1]}
        row["model_ms"] = first_token_ms(model, prompt, options.repeats)
        vg.wrap(model)
        row["error"] = distance([logits(model, prompt)], [seen])
        check(row["error"], LARGEST_ERROR)
        row["same_tokens"] = agreeing(generate(model, prompt, TOKENS), tokens)
        row["wrapped_ms"] = first_token_ms(model, prompt, options.repeats)
        assert not vg.encoders(model)["model.visual"].stats.eager, "ran eager"  # noqa: S101
        vg.unwrap(model)
        assert torch.equal(logits(model, prompt), seen), f"{name}: other logits unwrapped"  # noqa: S101
        result["rows"].append(row)
    write_json(options.json, result)
    header = ("prompt", "tokens", "model_ms", "wrapped_ms", "error", "same_tokens")
    print(
        table(header, [[row[key] if key != "error" else f"{row[key]:.1e}" for key in header] for row in result["rows"]])
    )


if __name__ == "__main__":
    main()
