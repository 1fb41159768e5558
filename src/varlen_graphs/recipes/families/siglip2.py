"""SigLIP 2 with NaFlex, for images of any size and aspect ratio, and LFM2-VL, which uses its vision tower.

Follows `transformers/models/siglip2/modeling_siglip2.py`, whose submodules it calls by name; they are the same in 4.57,
5.17, 5.23 and 5.24. In 4.57 they are one level deeper, in a `Siglip2VisionTransformer`.

The tower takes a padded batch and masks its padding. Here the real rows are packed when they are copied in, and attend
within their image, so only real rows are computed and nothing is masked.
"""

import inspect
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import CuSeqlens, interpolate_positions
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.grids import GridHW
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Items, Rows
from varlen_graphs.recipes.blocks import linear_activation, siglip_layers
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, item_table, output_class

PARTS = ("embeddings", "encoder", "post_layernorm", "use_head")


@register("Siglip2VisionModel", "Siglip2VisionTransformer")
def siglip2(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the vision tower of SigLIP 2 (NaFlex) or LFM2-VL.

    The encoder is called as the tower is, with `pixel_values` `[batch, length, 3 * patch * patch]`,
    `pixel_attention_mask` `[batch, length]`, and `spatial_shapes` `[batch, 2]`, height and width of each image in
    patches. It returns the tower's own output type with `last_hidden_state` `[batch, length, hidden]`, zero where the
    mask is zero, and, if the tower has a head, `pooler_output` `[batch, hidden]`.

    Budgets count real patches; the padding of a batch costs only copies. Shapes and masks on the GPU cost one copy to
    the host each. Position embeddings are resampled inside the graph, with the filter of
    `torch.nn.functional.interpolate(antialias=True)` in closed form, so new sizes cost no more than known ones.

    Args:
        tower: `Siglip2VisionModel`, `model.vision_model` of a `Siglip2Model`, `model.model.vision_tower` of LFM2-VL.
        budgets: As for `GraphedEncoder`, in patches; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of a SigLIP 2 vision tower.
    """
    parts = _parts(tower)
    check_parts(
        parts,
        PARTS,
        "the vision tower of SigLIP 2 or LFM2-VL, which is model.vision_model or model.model.vision_tower of a whole "
        "model",
    )
    output_type = output_class(tower, "BaseModelOutputWithPooling")

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule, table: ItemTable,
        cu_probes: Tensor | None = None,
    ) -> Any:  # fmt: skip
        parts = _parts(tower)
        x = interpolate_positions(
            parts.embeddings.position_embedding.weight,
            table,
            antialias=True,
            add=parts.embeddings.patch_embedding(pixel_values),
        )
        layers, last = parts.encoder.layers, parts.post_layernorm
        normed = siglip_layers(layers, x, last, cu_seqlens, max_seqlen, schedule, attention)
        pooled = None
        if cu_probes is not None:
            images = table.values.shape[0]
            pooled = _pool(parts.head, normed, images, cu_probes, cu_seqlens, max_seqlen, attention)
        return output_type(last_hidden_state=normed, pooler_output=pooled)

    masks = [name for name in inspect.signature(tower.forward).parameters if name.endswith("attention_mask")]
    mask = masks[0] if masks else "pixel_attention_mask"  # it goes by two names in transformers 4.57
    spec = BufferSpec(
        rows=InputRows("pixel_values", shape=(parts.embeddings.patch_embedding.in_features,), padded_by=mask),
        layout=GridHW("spatial_shapes"),
        buffers=[
            *attention_buffers(parts.encoder.layers[0].self_attn, "item"),
            item_table(),
            *([CuSeqlens("cu_probes", queries=1)] if parts.use_head else []),
        ],
        outputs=Fields(last_hidden_state=Rows(), **({"pooler_output": Items()} if parts.use_head else {})),
        declared_by="recipe",
    )
    options = {"eager_if": _adapted_head} | options
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _parts(tower: Any) -> Any:
    """Return the module with the submodules: the tower, or the one inside it in transformers 4.57."""
    return getattr(tower, "vision_model", tower)


def _pool(
    head: Any, x: Tensor, images: int, cu_probes: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: AttentionBackend
) -> Tensor:
    """Pool the rows of each image by the attention of a learned query, the probe: `[images, hidden]`."""
    mha = head.attention
    query_weight, weight = mha.in_proj_weight.split([mha.embed_dim, 2 * mha.embed_dim])
    query_bias, bias = mha.in_proj_bias.split([mha.embed_dim, 2 * mha.embed_dim])
    probe = F.linear(head.probe[0], query_weight, query_bias)
    q = rearrange(probe, "1 (heads dim) -> 1 heads dim", heads=mha.num_heads).expand(images, -1, -1).contiguous()
    k, v = rearrange(
        F.linear(x, weight, bias), "rows (two heads dim) -> two rows heads dim", two=2, heads=mha.num_heads
    )
    attended = varlen_attention(
        q, k, v, cu_probes, 1, cu_seqlens_k=cu_seqlens, max_seqlen_k=max_seqlen, backend=backend
    )
    x, mlp = mha.out_proj(rearrange(attended, "images heads dim -> images (heads dim)")), head.mlp
    out: Tensor = x + mlp.fc2(linear_activation(head.layernorm(x), mlp.fc1, mlp.activation_fn))
    return out


def _adapted_head(tower: Any) -> str | None:
    """Return why calls must run eager: the weights of the head's attention are read, so it must be torch's own."""
    parts = _parts(tower)
    plain = not parts.use_head or type(parts.head.attention) is nn.MultiheadAttention
    return None if plain else "the attention of the head is not torch's own"
