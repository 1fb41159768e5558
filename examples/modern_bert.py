"""Run ModernBERT of transformers, unmodified, on packed rows: sliding and full attention from one declaration."""

import torch
from transformers import ModernBertConfig, ModernBertModel

import varlen_graphs as vg
from varlen_graphs.attention.transformers import use_attention


def forward(model, input_ids, position_ids, cu_seqlens, max_seqlen):
    """Run all documents as one sequence of the model, which its attention splits by `cu_seqlens`."""
    with use_attention(model):
        out = model(
            input_ids[None],
            position_ids=position_ids[None],
            attention_mask={"full_attention": None, "sliding_attention": None},  # otherwise the model makes masks
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=max_seqlen,
            max_length_k=max_seqlen,
        )
    return out.last_hidden_state[0]


def graph(model, **options):
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("input_ids", shape=(), dtype=torch.int64, pad=model.config.pad_token_id),
        layout=vg.Lengths("lengths"),
        buffers=[
            vg.buffers.RowPositions("position_ids"),
            vg.buffers.CuSeqlens("cu_seqlens", per="item"),
            vg.buffers.MaxSeqlen("max_seqlen", per="item"),
        ],
        outputs=vg.outputs.Rows(),
    )
    return vg.GraphedEncoder(model, [256, 512, 1024], spec, forward=forward, **options)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96,
        local_attention=32, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = ModernBertModel(config).to(device).eval()
    encoder = graph(model, backend="cuda" if device == "cuda" else "tape")

    lengths = [17, 230, 5, 101]
    documents = [torch.randint(1000, (length,), device=device) for length in lengths]
    out = encoder(torch.cat(documents), lengths=lengths)
    with torch.no_grad():
        eager = torch.cat([model(document[None]).last_hidden_state[0] for document in documents])
    print(list(out.shape), encoder)
    print("largest difference from eager:", (out - eager).abs().max().item())
