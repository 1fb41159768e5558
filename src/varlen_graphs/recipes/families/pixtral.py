"""Pixtral's vision tower: that of Pixtral, Mistral 3 and LightOnOCR.

Follows `transformers/models/pixtral/modeling_pixtral.py`, whose submodules it calls by name. The rotary embedding of
transformers 4.57 looks up a table of positions; that of 5.23 takes rows and columns.

The tower takes pictures padded to one size, convolves their padding too, and masks attention between images. Here the
real patches are packed when they are copied in, and attend within their image. The tower itself returns them packed.
"""

import math
from typing import Any

from einops import rearrange
from torch import Tensor

from varlen_graphs.attention.api import TileSchedule, varlen_attention
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import GridPositions
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.normalize import Normalize
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.kernels.rotary.op import apply_rotary
from varlen_graphs.layouts.pictures import PictureSizes
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Entries
from varlen_graphs.recipes.blocks import add_norm, patch_convolution, project_heads, rms_norm, swiglu
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, output_class
from varlen_graphs.recipes.vision_tower import recorded

PARTS = ("patch_conv", "ln_pre", "transformer", "patch_positional_embedding")

PACKED = Entries(lambda patches: patches, lambda budget: budget.rows, rows_dim=1)
"""`[1, patches, hidden]`, the patches of all images one after another."""


@register("PixtralVisionModel")
def pixtral(
    tower: Any,
    budgets: Budgets | None = None,
    *,
    attention: AttentionBackend = "auto",
    normalize: Normalize | None = None,
    **options: Any,
) -> GraphedEncoder:
    """Graph Pixtral's vision tower.

    The encoder is called as the tower is, with `pixel_values` `[images, channels, height, width]`, pictures padded at
    the right and at the bottom, and `image_sizes` `[images, 2]`, height and width of each in pixels; without them, all
    pixels are real. It returns the tower's own output type with `last_hidden_state` `[1, patches, hidden]`, the real
    patches of all images, and `hidden_states` of the same shape where a call asks for them.

    Budgets count real patches; the padding of pictures is not even copied. Sizes on the GPU cost one copy to the host.

    Args:
        tower: `PixtralVisionModel`: `model.model.vision_tower` of Mistral 3, `model.model.vision_encoder` of
            LightOnOCR.
        budgets: As for `GraphedEncoder`, in patches; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        normalize: If given, pictures are bytes, normalised inside the graph, see `Normalize`.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of Pixtral's vision tower.
    """
    check_parts(tower, PARTS, "Pixtral's vision tower, which is model.model.vision_tower of Mistral 3")
    output_type = output_class(tower, "BaseModelOutputWithPooling", "BaseModelOutput")

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        positions: Tensor, output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        layers = tower.transformer.layers
        x = tower.ln_pre(patch_convolution(pixel_values.flatten(1), tower.patch_conv))
        side = _table_side(tower)
        at = positions if side is None else positions[:, 0] * side + positions[:, 1]
        rotary = tower.patch_positional_embedding(x, at)
        states, normed = [x], rms_norm(x, layers[0].attention_norm)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            attn = layer.attention
            q, k, v = project_heads(normed, (attn.q_proj, attn.k_proj, attn.v_proj), attn.num_heads, attn.head_dim)
            q, k = apply_rotary(q, k, *rotary)
            attended = varlen_attention(
                q, k, v, cu_seqlens, max_seqlen, scale=attn.head_dim**-0.5, schedule=schedule, backend=attention
            )
            change = attn.o_proj(rearrange(attended, "rows heads dim -> rows (heads dim)"))
            x, normed = add_norm(x, change, layer.ffn_norm)
            change = swiglu(normed, layer.feed_forward)
            if following is None:
                x = x + change
            else:
                x, normed = add_norm(x, change, following.attention_norm)
            states.append(x)
        states = [state[None] for state in states]
        return output_type(last_hidden_state=states[-1], **recorded(states, states[-1], output_hidden_states))

    conv = tower.patch_conv.weight
    spec = BufferSpec(
        rows=InputRows.pictures("pixel_values", tuple(conv.shape[1:]), normalize),
        layout=PictureSizes("image_sizes", patch=conv.shape[-1]),
        buffers=[
            *attention_buffers(tower.transformer.layers[0].attention, "item"),
            GridPositions("positions", largest=_table_side(tower)),
        ],
        outputs=Fields(last_hidden_state=PACKED, hidden_states=PACKED),
        declared_by="recipe",
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _table_side(tower: Any) -> int | None:
    """Return the patches along a side of the table of positions, which limits images; `None` if there is no table."""
    frequencies = tower.patch_positional_embedding.inv_freq
    return math.isqrt(len(frequencies)) if frequencies.dim() == 2 else None
