"""A BERT on pairs of texts: types of tokens beside the ids, on padded batches as tokenizers return them."""

import torch
from transformers import BertConfig, BertModel

import varlen_graphs as vg


def forward(model, input_ids, token_type_ids, mask):
    """Call the model with a mask of its own form; one `[batch, length]` it would read on the host."""
    return model(input_ids, token_type_ids=token_type_ids, attention_mask=mask)


spec = vg.BufferSpec(
    rows=vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64),
    layout=vg.Mask("attention_mask"),
    inputs=[vg.inputs.PerRow("token_type_ids", dtype=torch.int64, default=0)],
    buffers=[vg.buffers.AttentionMask("mask")],
    outputs=vg.outputs.Fields(last_hidden_state=vg.outputs.Rows(), pooler_output=vg.outputs.Items()),
)

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "cuda" if device == "cuda" else "tape"
    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertModel(BertConfig(num_hidden_layers=2, **sizes)).to(device).eval().requires_grad_(False)
    budgets = vg.budgets.PaddedLadder(batch=8, length=128, step=2)
    encoder = vg.GraphedEncoder(model, budgets, spec, forward=forward, backend=backend)

    lengths, firsts = torch.tensor([[17], [103], [9]]), torch.tensor([[5], [60], [8]])  # of pairs, of their first texts
    place = torch.arange(103)
    inputs = {
        "input_ids": torch.randint(1000, (3, 103)) * (place < lengths),
        "token_type_ids": (place >= firsts).long() * (place < lengths),
        "attention_mask": (place < lengths).long(),
    }
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}

    out, eager = encoder(**inputs), model(**inputs)
    tokens = (out.last_hidden_state - eager.last_hidden_state * inputs["attention_mask"][..., None]).abs().max()
    pooled = (out.pooler_output - eager.pooler_output).abs().max()
    print(f"tokens {list(out.last_hidden_state.shape)}, pooled {list(out.pooler_output.shape)}", encoder)
    print("largest difference from eager:", max(tokens, pooled).item())
