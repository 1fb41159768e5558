"""Packed forwards of text models of transformers whose own ones take many small kernels: BERT, ModernBERT, Llama."""

from typing import Any

from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import tile_schedule, varlen_attention
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.recipes.blocks import add_norm, project_heads, rms_norm, split_heads, swiglu
from varlen_graphs.recipes.fused import Fused
from varlen_graphs.recipes.texts.text_probe import ROWS
from varlen_graphs.recipes.vision_tower import recorded


def _llama(
    model: Any, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    token_type_ids: Tensor | None = None, output_hidden_states: Any = None,
) -> dict[str, Any]:  # fmt: skip
    config, layers = model.config, [*model.layers][: model.config.num_hidden_layers]
    x = model.embed_tokens(ids)
    cos, sin = (table[0] for table in model.rotary_emb(x[None], positions[None]))
    heads, head_dim = config.num_attention_heads, layers[0].self_attn.head_dim
    windows = getattr(config, "sliding_window", None)  # of layers that say nothing else
    schedule = tile_schedule(cu_seqlens, max_seqlen, rows=len(ids), heads=heads, head_dim=head_dim)
    states, normed = [x], rms_norm(x, layers[0].input_layernorm)
    for layer, following in zip(layers, [*(layer.input_layernorm for layer in layers[1:]), model.norm], strict=True):
        attn = layer.self_attn
        (q,) = project_heads(normed, [attn.q_proj], heads, head_dim)
        k, v = project_heads(normed, [attn.k_proj, attn.v_proj], config.num_key_value_heads, head_dim)
        if hasattr(attn, "q_norm"):
            q, k = rms_norm(q, attn.q_norm), rms_norm(k, attn.k_norm)
        q, k = apply_rotary(q, k, cos, sin)
        attended = varlen_attention(
            q, k, v, cu_seqlens, max_seqlen, scale=attn.scaling, causal=attn.is_causal, schedule=schedule,
            window=_around(getattr(attn, "sliding_window", windows)),
        )  # fmt: skip
        change = attn.o_proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
        x, normed = add_norm(x, change, layer.post_attention_layernorm)
        x, normed = add_norm(x, swiglu(normed, layer.mlp), following)
        states.append(x)
    return {ROWS: normed} | recorded(states, normed, output_hidden_states)


def _modern_bert(
    model: Any, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    token_type_ids: Tensor | None = None, output_hidden_states: Any = None,
) -> dict[str, Any]:  # fmt: skip
    layers, heads, head_dim = [*model.layers], model.config.num_attention_heads, model.layers[0].attn.head_dim
    x = model.embeddings(input_ids=ids[None])[0]
    kinds = dict.fromkeys(layer.attention_type for layer in layers)
    tables = {kind: [table[0] for table in model.rotary_emb(x[None], positions[None], kind)] for kind in kinds}
    schedule = tile_schedule(cu_seqlens, max_seqlen, rows=len(ids), heads=heads, head_dim=head_dim)
    states, normed = [x], layers[0].attn_norm(x)
    for layer, following in zip(layers, [*(layer.attn_norm for layer in layers[1:]), model.final_norm], strict=True):
        attn = layer.attn
        q, k, v = split_heads(attn.Wqkv(normed), heads, head_dim)
        q, k = apply_rotary(q, k, *tables[layer.attention_type])
        attended = varlen_attention(
            q, k, v, cu_seqlens, max_seqlen, schedule=schedule, window=_around(attn.sliding_window)
        )
        change = attn.out_drop(attn.Wo(rearrange(attended, "rows heads dim -> rows (heads dim)")))
        x, normed = add_norm(x, change, layer.mlp_norm)
        x, normed = add_norm(x, layer.mlp(normed), following)
        states.append(x)
    return {ROWS: normed} | recorded(states, normed, output_hidden_states)


def _bert(
    model: Any, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    token_type_ids: Tensor | None = None, output_hidden_states: Any = None,
) -> dict[str, Any]:  # fmt: skip
    layers, heads = [*model.encoder.layer], model.config.num_attention_heads
    head_dim = layers[0].attention.self.attention_head_size
    types = None if token_type_ids is None else token_type_ids[None]
    x = model.embeddings(input_ids=ids[None], token_type_ids=types, position_ids=positions[None])[0]
    schedule = tile_schedule(cu_seqlens, max_seqlen, rows=len(ids), heads=heads, head_dim=head_dim)
    states = [x]
    for layer in layers:
        attn, output = layer.attention.self, layer.attention.output
        q, k, v = project_heads(x, (attn.query, attn.key, attn.value), heads, head_dim)
        attended = varlen_attention(
            q, k, v, cu_seqlens, max_seqlen, scale=attn.scaling, causal=attn.is_causal, schedule=schedule
        )
        change = output.dropout(output.dense(rearrange(attended, "rows heads dim -> rows (heads dim)")))
        _, x = add_norm(x, change, output.LayerNorm)
        change = layer.output.dropout(layer.output.dense(layer.intermediate(x)))
        _, x = add_norm(x, change, layer.output.LayerNorm)
        states.append(x)
    return {ROWS: x} | recorded(states, x, output_hidden_states)


def _around(window: int | None) -> tuple[int, int]:
    """Return the keys before and after its own that a query sees, from a window of transformers, its own counted."""
    return (window - 1, window - 1) if window else (-1, -1)


FUSED: dict[str, Fused] = {
    f"{name}Model": fused
    for fused, names in (
        (Fused(_llama, r"layers\.\d+(\.self_attn)?"), ("Llama", "Mistral", "Qwen2", "Qwen3")),
        (Fused(_modern_bert, r"layers\.\d+(\.attn)?"), ("ModernBert",)),
        (
            Fused(_bert, r"encoder(\.layer\.\d+(\.output|\.attention(\.self|\.output)?)?)?"),
            ("Bert", "Camembert", "Roberta", "XLMRoberta"),
        ),
    )
    for name in names
}
"""Fused forwards on packed tokens, by the class of the model."""
