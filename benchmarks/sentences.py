"""Seconds of `SentenceTransformer.encode` for 1,000 short texts: eager and wrapped, tokenizer included.

Run with `python -m benchmarks.sentences`. A model of MiniLM-L6's size with random weights and a tokenizer trained on
the spot; batches of 32; the models in turn. The texts are sentences of Python's own help.
"""

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

import varlen_graphs as vg
from benchmarks.common import distance, facts, headline, table, write_json
from benchmarks.encoders import MODELS, build

TEXTS, BATCH = 1000, 32


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about = facts()
    print(f"{headline(about)}\n")
    result: dict[str, Any] = {
        **about,
        "rows": [run(dtype, options.repeats) for dtype in (torch.float32, torch.float16)],
    }
    write_json(options.json, result)
    header = ("dtype", "texts", "mean_tokens", "eager_s", "wrapped_s", "tokenizer_s", "error")
    print(table(header, [[row[key] for key in header] for row in result["rows"]]))


def sentences() -> list[str]:
    """Short English texts."""
    text = " ".join(topics.topics[name] for name in sorted(topics.topics))
    found = [" ".join(one.split()) for one in re.split(r"(?<=[a-z])\.\s+(?=[A-Z])", text)]
    return [one for one in found if 20 <= len(one) <= 1200 and one.count(" ") > 3][:TEXTS]


def save(folder: str, corpus: list[str]) -> None:
    """Save a model and its tokenizer."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(corpus, vocab_size=8000, show_progress=False)
    trained.save_model(folder)
    BertTokenizerFast(vocab=f"{folder}/vocab.txt", model_max_length=256).save_pretrained(folder)
    build(MODELS["MiniLM-L6"], torch.float32).save_pretrained(folder)


def load(folder: str, dtype: torch.dtype) -> Any:
    """Load it as sentence-transformers does, with mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    parts = [Transformer(folder), Pooling(384, "mean"), Normalize()]
    return SentenceTransformer(modules=parts, device="cuda").to(dtype).eval()


def run(dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Check and time both models."""
    corpus = sentences()
    with tempfile.TemporaryDirectory() as folder:
        save(folder, corpus)
        models = {"eager": load(folder, dtype), "wrapped": vg.wrap(load(folder, dtype))}

    def encode(model: Any) -> Tensor:
        vectors: Tensor = model.encode(corpus, batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
        return vectors

    def seconds(once: Any) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        once()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def tokenize() -> None:
        tokenizer, order = models["eager"].tokenizer, sorted(corpus, key=len, reverse=True)
        for at in range(0, len(order), BATCH):
            tokenizer(order[at : at + BATCH], padding=True, truncation=True, return_tensors="pt")

    error = distance([encode(models["wrapped"])], [encode(models["eager"])])
    walls: dict[str, list[float]] = {"eager": [], "wrapped": [], "tokenizer": []}
    for _ in range(repeats):
        for name, model in models.items():
            walls[name].append(seconds(lambda model=model: encode(model)))
        walls["tokenizer"].append(seconds(tokenize))
    lengths = [len(ids) for ids in models["eager"].tokenizer(corpus).input_ids]
    eager_calls = {
        reason: n for encoder in vg.encoders(models["wrapped"]).values() for reason, n in encoder.stats.eager.items()
    }
    medians = {f"{name}_s": statistics.median(times) for name, times in walls.items()}
    about = {"dtype": str(dtype).removeprefix("torch."), "texts": len(corpus), "mean_tokens": statistics.fmean(lengths)}
    return about | medians | {"error": error, "eager_calls": eager_calls}


if __name__ == "__main__":
    main()
