"""Run a text encoder of transformers on padded batches as CUDA graphs, or on the tape if there is no GPU."""

import torch
from transformers import BertConfig, BertModel

import varlen_graphs as vg


def forward(model, input_ids, attention_mask, **options):
    """Call the model with a mask `[batch, 1, 1, length]`, which transformers 5 uses unchanged.

    It would read a mask `[batch, length]` on the host to look for padding, which no graph can hold.
    """
    return model(input_ids, attention_mask=attention_mask[:, None, None], **options)


def graph(model, **options):
    spec = vg.BufferSpec(
        rows=vg.PackedRows("input_ids", shape=(), dtype=torch.int64, pad=model.config.pad_token_id),
        layout=vg.PaddedMask("attention_mask", dtype=torch.bool),
        outputs=vg.Outputs(last_hidden_state=vg.Rows(), pooler_output=vg.Items()),
    )
    return vg.GraphedEncoder(model, vg.PaddedLadder(batch=8, length=128), spec, forward=forward, **options)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    model = BertModel(config).to(device).eval()
    encoder = graph(model, backend="cuda" if device == "cuda" else "tape")

    lengths = torch.tensor([17, 103, 5, 64, 9])  # as a tokenizer returns for five texts
    attention_mask = (torch.arange(103) < lengths[:, None]).long().to(device)
    input_ids = torch.randint(1000, (5, 103), device=device) * attention_mask

    out = encoder(input_ids, attention_mask=attention_mask)
    with torch.no_grad():
        eager = model(input_ids, attention_mask=attention_mask)
    tokens = (out.last_hidden_state - eager.last_hidden_state * attention_mask[..., None]).abs().max()
    pooled = (out.pooler_output - eager.pooler_output).abs().max()
    print(f"tokens {list(out.last_hidden_state.shape)}, pooled {list(out.pooler_output.shape)}", encoder)
    print("largest difference from eager:", max(tokens, pooled).item())
