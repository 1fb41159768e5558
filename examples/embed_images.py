"""Embed a large set of images in batches, as an indexing job does. Rows are written where the graph reads them."""

import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

import varlen_graphs as vg


def images(count):
    """Yield images of any size, in patches; yours come from files and a processor."""
    dice = torch.Generator().manual_seed(0)
    for _ in range(count):
        h, w = (2 * torch.randint(2, 9, (2,), generator=dice)).tolist()
        yield (1, h, w), torch.randn(h * w, 3 * 2 * 16 * 16, generator=dice)


def batches(stream, most_rows):
    """Group images into batches that fit the largest budget."""
    batch, rows = [], 0
    for grid, pixels in stream:
        if batch and rows + len(pixels) > most_rows:
            yield batch
            batch, rows = [], 0
        batch.append((grid, pixels))
        rows += len(pixels)
    if batch:
        yield batch


def embed(encoder, stream):
    """Yield one vector per image, the mean of its merged patches."""
    for batch in batches(stream, encoder.budgets[-1].rows):
        with encoder.stage([grid for grid, _ in batch]) as stage:
            start = 0
            for _, pixels in batch:  # the batch needs no memory of its own
                stage.rows[start : start + len(pixels)].copy_(pixels, non_blocking=True)
                start += len(pixels)
            features = stage.output.pooler_output
        yield from (part.mean(0) for part in features.split([t * h * w // 4 for (t, h, w), _ in batch]))


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "deepstack_visual_indexes": [0]}
    torch.manual_seed(0)
    tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(**small if device == "cpu" else {})).to(device).eval()
    encoder = vg.recipes.qwen3_vl(tower, vg.Ladder(256, 1024), backend="cuda" if device == "cuda" else "tape")
    vectors = list(embed(encoder, images(40)))
    print(f"{len(vectors)} vectors of {len(vectors[0])}; padding {encoder.stats.padding_share:.0%}")

    worst = 0.0
    for vector, (grid, pixels) in zip(vectors[:5], images(5), strict=True):
        alone = encoder.eager(pixels.to(device), grid_thw=[grid]).pooler_output.mean(0)
        worst = max(worst, (vector - alone).abs().max().item())
    print("largest difference from eager:", worst)
