"""Generate with a whole Qwen3-VL model, wrapped in one line: the tokens are the same. Random weights."""

import time

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import varlen_graphs as vg

IMAGE, START, END = 190, 192, 193


def make_model(device):
    """Return a model with random weights; yours comes from `from_pretrained`."""
    small = device == "cpu"
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "deepstack_visual_indexes": [1, 2],
    }
    text = {
        "vocab_size": 200, "hidden_size": 64 if small else 1024, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    vision = {**(vision if small else {}), "out_hidden_size": text["hidden_size"]}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START)
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config).to(device).eval().requires_grad_(False)


def make_prompt(grids, device):
    """Return inputs as a processor makes them of images of these sizes, in patches."""
    ids = [1, 2]
    for _, h, w in grids:
        ids += [START, *[IMAGE] * (h * w // 4), END]
    ids = torch.tensor([[*ids, 5]])
    rows = sum(t * h * w for t, h, w in grids)
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(rows, 3 * 2 * 16 * 16), "image_grid_thw": torch.tensor(grids),
    }  # fmt: skip
    return {name: value.to(device) for name, value in inputs.items()}


def generate(model, prompt):
    start = time.perf_counter()
    out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    return out, time.perf_counter() - start


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(device)
    prompts = [make_prompt([(1, 14, 14)], device), make_prompt([(1, 8, 12), (1, 10, 6)], device)]
    expected = [generate(model, prompt) for prompt in prompts]

    vg.wrap(model, budgets=[256, 512], backend="cuda" if device == "cuda" else "tape")
    for encoder in vg.encoders(model).values():
        encoder.capture()  # or let the first call do it
    for prompt, (tokens, seconds) in zip(prompts, expected, strict=True):
        graphed, took = generate(model, prompt)
        assert torch.equal(graphed, tokens)
        print(f"{graphed[0, -4:].tolist()}: {seconds * 1e3:.1f} ms before, {took * 1e3:.1f} ms graphed")
    for path, encoder in vg.encoders(model).items():
        print(path, encoder.stats)
        rows, grid = prompts[0]["pixel_values"], prompts[0]["image_grid_thw"]
        got, eager = encoder(rows, grid), encoder.eager(rows, grid)
        print("largest difference from eager:", (got.pooler_output - eager.pooler_output).abs().max().item())
