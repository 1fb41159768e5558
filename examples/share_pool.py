"""Share a pool between two encoders: their graphs share the memory of intermediate tensors, and take turns."""

import torch
from text_encoder import TextEncoder, graph

import varlen_graphs as vg

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "cuda" if device == "cuda" else "tape"
    pool = vg.options.Pool()
    torch.manual_seed(0)
    queries, documents = (
        graph(TextEncoder(depth=depth).to(device).eval(), backend=backend, pool=pool) for depth in (2, 4)
    )
    worst = 0.0
    for lengths in ([5, 9], [230, 101, 17], [64]):
        input_ids = torch.randint(1000, (sum(lengths),), device=device)
        for encoder in (queries, documents):
            out, eager = encoder(input_ids, lengths=lengths), encoder.eager(input_ids, lengths=lengths)
            worst = max(worst, (out["pooled"] - eager["pooled"]).abs().max().item())
    if device == "cuda":
        print(f"{torch.cuda.memory_reserved() / 2**20:.0f} MiB reserved for both")
    print("largest difference from eager:", worst)
