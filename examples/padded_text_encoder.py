"""Run text encoders of transformers on padded batches as CUDA graphs, or on the tape if there is no GPU."""

import torch
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel

import varlen_graphs as vg


def forward_bert(model, input_ids, mask):
    """Call the model with a mask of its own form; `[batch, length]` it would read on the host, as no graph can."""
    return model(input_ids, attention_mask=mask)


def forward_modern_bert(model, input_ids, full, sliding):
    return model(input_ids, attention_mask={"full_attention": full, "sliding_attention": sliding})


def graph(model, **options):
    """Return an encoder of a model that is called with ids and a mask `[batch, length]`, as before."""
    outputs = {"last_hidden_state": vg.outputs.Rows()}
    if isinstance(model, ModernBertModel):
        forward, reach = forward_modern_bert, model.config.sliding_window
        masks = [vg.buffers.AttentionMask("full"), vg.buffers.AttentionMask("sliding", window=(reach, reach))]
    else:
        forward, masks = forward_bert, [vg.buffers.AttentionMask("mask")]  # causal=True for a CLIPTextModel
        outputs["pooler_output"] = vg.outputs.Items()
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64, pad=model.config.pad_token_id),
        layout=vg.Mask("attention_mask"),
        buffers=masks,
        outputs=vg.outputs.Fields(**outputs),
    )
    return vg.GraphedEncoder(model, vg.budgets.PaddedLadder(batch=8, length=128), spec, forward=forward, **options)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    modern = {
        "local_attention": 32, "global_attn_every_n_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "cls_token_id": 1, "sep_token_id": 2,
    }  # fmt: skip
    models = [
        BertModel(BertConfig(num_hidden_layers=2, **sizes)),
        ModernBertModel(ModernBertConfig(num_hidden_layers=4, **sizes, **modern)),
    ]
    lengths = torch.tensor([17, 103, 5, 64, 9])  # as a tokenizer returns for five texts
    attention_mask = (torch.arange(103) < lengths[:, None]).long().to(device)
    input_ids = torch.randint(1000, (5, 103), device=device) * attention_mask

    largest = 0.0
    for model in models:
        encoder = graph(model.to(device).eval(), backend="cuda" if device == "cuda" else "tape")
        with torch.no_grad():
            out = encoder(input_ids, attention_mask=attention_mask)
            eager = model(input_ids, attention_mask=attention_mask)
        assert not encoder.stats.eager
        tokens = (out.last_hidden_state - eager.last_hidden_state * attention_mask[..., None]).abs().max()
        largest = max(largest, tokens.item())
        if "pooler_output" in out:
            largest = max(largest, (out.pooler_output - eager.pooler_output).abs().max().item())
        print(f"{type(model).__name__}: tokens {list(out.last_hidden_state.shape)}", encoder)
    print("largest difference from eager:", largest)
