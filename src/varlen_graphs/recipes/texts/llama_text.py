"""Packed forward of text models with the layers of Llama, such as Qwen3-Embedding: norms, rotation and SwiGLU fused."""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.attention.api import tile_schedule, varlen_attention
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.recipes.blocks import add_norm, project_heads, rms_norm, runs_own_forward, swiglu
from varlen_graphs.recipes.texts.text_model import ROWS
from varlen_graphs.recipes.vision_tower import recorded

FILES = {f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3")}
"""Models whose layers compute `x + self_attn(input_layernorm(x))`, and then `x + mlp(post_attention_layernorm(x))`."""


def is_llama(model: nn.Module) -> bool:
    """Return True for one of these models, if it, its layers and their attention run the forward of transformers."""
    layers = getattr(model, "layers", ())
    parts = (model, *layers, *(getattr(layer, "self_attn", layer) for layer in layers))
    return len(parts) > 1 and all(type(part).__module__ in FILES and runs_own_forward(part) for part in parts)


def llama_forward(
    model: Any, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    output_hidden_states: Any = None, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run the submodules of a model on token ids and positions `[rows]`, and return the fields of its output."""
    layers = [*model.layers][: model.config.num_hidden_layers]
    x = model.embed_tokens(ids)
    cos, sin = (table[0] for table in model.rotary_emb(x[None], positions[None]))
    heads, head_dim = model.config.num_attention_heads, layers[0].self_attn.head_dim
    windows = getattr(model.config, "sliding_window", None)  # of layers that say nothing else
    schedule = tile_schedule(cu_seqlens, max_seqlen, rows=len(ids), heads=heads, head_dim=head_dim)
    states, normed = [x], rms_norm(x, layers[0].input_layernorm)
    for layer, following in zip(layers, [*(layer.input_layernorm for layer in layers[1:]), model.norm], strict=True):
        attn = layer.self_attn
        (q,) = project_heads(normed, [attn.q_proj], heads, head_dim)
        k, v = project_heads(normed, [attn.k_proj, attn.v_proj], model.config.num_key_value_heads, head_dim)
        if hasattr(attn, "q_norm"):
            q, k = rms_norm(q, attn.q_norm), rms_norm(k, attn.k_norm)
        q, k = apply_rotary(q, k, cos, sin)
        window = getattr(attn, "sliding_window", windows)
        attended = varlen_attention(
            q, k, v, cu_seqlens, max_seqlen, scale=attn.scaling, causal=attn.is_causal, schedule=schedule,
            window=(window - 1, window - 1) if window else (-1, -1),
        )  # fmt: skip
        change = attn.o_proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
        x, normed = add_norm(x, change, layer.post_attention_layernorm)
        x, normed = add_norm(x, swiglu(normed, layer.mlp), following)
        states.append(x)
    return {ROWS: normed} | recorded(states, normed, output_hidden_states)
