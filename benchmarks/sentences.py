"""Seconds of `SentenceTransformer.encode`: eager, compiled as sentence-transformers documents it, and wrapped.

Run with `python -m benchmarks.sentences`. Models of real sizes with random weights, bfloat16, mean pooling, and a
tokenizer trained on the spot; batches of 1, 8 and 32; the models in turn. The texts are sentences of Python's own help.
*compiled* is `model.compile(mode="reduce-overhead", dynamic=True)`, which replays CUDA graphs of the lengths that came
before: all batches are encoded before any is timed. The time of the tokenizer alone is that within `encode`.
"""

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

import varlen_graphs as vg
from benchmarks.common import check, distance, reason, report
from benchmarks.encoders import MODELS, build

NAMES = ("MiniLM-L6", "BERT-base", "ModernBERT-base", "Qwen3-Embedding-0.6B")
"""Models, which `benchmarks.encoders` measures without their tokenizers."""

BATCHES = (1, 8, 32)

CAUSAL = ("Qwen3-Embedding-0.6B",)
"""Models that see padding on the left, as their tokenizers make it."""


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = (row for name in options.models for row in rows(name, sentences(options.texts), options.repeats))
    times = [f"{name}_s" for name in ("eager", "compiled", "wrapped", "tokenizer")]
    report(found, ("model", "batch", "texts", *times), options.json)


def sentences(count: int) -> list[str]:
    """Short English texts."""
    text = " ".join(topics.topics[name] for name in sorted(topics.topics))
    found = [" ".join(one.split()) for one in re.split(r"(?<=[a-z])\.\s+(?=[A-Z])", text)]
    return [one for one in found if 20 <= len(one) <= 1200 and one.count(" ") > 3][:count]


def save(folder: str, name: str, corpus: list[str]) -> None:
    """Save a model and its tokenizer."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(corpus, vocab_size=8000, show_progress=False)
    trained.save_model(folder)
    side = "left" if name in CAUSAL else "right"
    tokenizer = BertTokenizerFast(vocab=f"{folder}/vocab.txt", model_max_length=256, padding_side=side)
    tokenizer.save_pretrained(folder)
    build(MODELS[name], torch.bfloat16).save_pretrained(folder)


def load(folder: str) -> Any:
    """Load it as sentence-transformers does, with mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    transformer = Transformer(folder)
    parts = [transformer, Pooling(transformer.get_embedding_dimension(), "mean"), Normalize()]
    return SentenceTransformer(modules=parts, device="cuda").to(torch.bfloat16).eval()


def rows(name: str, corpus: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Check and time the systems of a model, batch by batch."""
    with tempfile.TemporaryDirectory() as folder:
        save(folder, name, corpus)
        models = {one: load(folder) for one in ("eager", "compiled", "wrapped")}
        torch._dynamo.reset()
        models["compiled"].compile(mode="reduce-overhead", dynamic=True)
        vg.wrap(models["wrapped"])
        exact = load(folder).float()

    for batch in BATCHES:
        expected = [encode(exact, corpus, batch)]
        row: dict[str, Any] = {"model": name, "batch": batch, "texts": len(corpus)}
        runs: dict[str, Callable[[], Any]] = {}
        for system, model in models.items():
            start = time.perf_counter()
            try:
                encode(model, corpus, batch)  # which compiles, or captures
                row[f"{system}_first_s"] = time.perf_counter() - start
                row[f"{system}_error"] = distance([encode(model, corpus, batch)], expected)
                check(row[f"{system}_error"], row["eager_error"])
            except Exception as failure:
                row[f"{system}_failed"] = reason(failure)
            else:
                runs[system] = partial(encode, model, corpus, batch)
        runs["tokenizer"] = partial(tokenize, models["eager"], corpus, batch)
        walls = {system: list[float]() for system in runs}
        for _ in range(repeats):
            for system, once in runs.items():
                walls[system].append(seconds(once))
        for encoder in vg.encoders(models["wrapped"]).values():
            row["eager_calls"] = dict(encoder.stats.eager)
        yield row | {f"{system}_s": statistics.median(times) for system, times in walls.items()}


def encode(model: Any, corpus: list[str], batch: int) -> Tensor:
    """The vectors of all texts, on the host: with reduced overhead, a batch overwrites those of the one before."""
    return torch.from_numpy(model.encode(corpus, batch_size=batch, show_progress_bar=False))


def tokenize(model: Any, corpus: list[str], batch: int) -> None:
    """The token ids of all texts, in the batches that `encode` makes."""
    order = sorted(corpus, key=len, reverse=True)
    for at in range(0, len(order), batch):
        model.tokenizer(order[at : at + batch], padding=True, truncation=True, return_tensors="pt")


def seconds(once: Callable[[], Any]) -> float:
    """The time until a run is done on the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    once()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
