"""The vision towers of Idefics 2, Idefics 3 and SmolVLM.

Follows `modeling_idefics2.py`, `modeling_idefics3.py` and `modeling_smolvlm.py` of transformers, whose submodules it
calls by name; they are the same in 4.57, 5.17, 5.23 and 5.24.

The tower takes tiles padded to one size, and masks attention to the padding. Here the real patches are packed when they
are copied in, and attend within their tile, so only real patches are computed and nothing is masked. Of Idefics 2 only:
the others are used with tiles without padding.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.attention.api import TileSchedule
from varlen_graphs.attention.backends import AttentionBackend
from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.buffers import Lookup
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.pictures import PictureMask
from varlen_graphs.outputs.declared import Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.blocks import patch_convolution, siglip_layers
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.towers import attention_buffers, check_parts, output_class
from varlen_graphs.recipes.vision_tower import recorded

PARTS = ("embeddings", "encoder", "post_layernorm")

LARGEST = 256
"""Largest number of patches along a side with position ids. Tiles have at most 70, images that are not split 128."""


@register("Idefics2VisionTransformer", "Idefics3VisionTransformer", "SmolVLMVisionTransformer")
def idefics(
    tower: Any, budgets: Budgets | None = None, *, attention: AttentionBackend = "auto", **options: Any
) -> GraphedEncoder:
    """Graph the vision tower of Idefics 2, Idefics 3 or SmolVLM.

    The encoder is called as the tower is, with `pixel_values` `[tiles, channels, height, width]`, padded at the right
    and at the bottom, and `patch_attention_mask` `[tiles, height, width]` in patches, whose real ones fill a rectangle
    in the upper left corner; without it, all patches are real. It returns the tower's own output type with
    `last_hidden_state` `[tiles, patches of a padded tile, hidden]`, zero where the mask is false, and `hidden_states`
    of the same shape where a call asks for them.

    The models Idefics 3 and SmolVLM make tokens of padding too, so calls of their towers with padding run eager, with
    the reason. Their processors make tiles without any.

    Budgets count real patches. A mask on the GPU costs one copy of a few integers to the host. A tile may have up to
    256 patches along a side; a larger one raises `LayoutError`.

    Args:
        tower: `model.model.vision_model` of a whole model.
        budgets: As for `GraphedEncoder`, in patches; `None` is `Ladder()`, as far as memory and time allow.
        attention: The attention backend.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` lacks a submodule or attribute of these vision towers.
    """
    check_parts(tower, PARTS, "the vision tower of Idefics 2, Idefics 3 or SmolVLM, which is model.model.vision_model")
    output_type = output_class(tower, "BaseModelOutputWithPooling", "BaseModelOutput")

    def forward(
        tower: Any, pixel_values: Tensor, cu_seqlens: Tensor, max_seqlen: int, schedule: TileSchedule,
        buckets: Tensor, output_hidden_states: Any = None,
    ) -> Any:  # fmt: skip
        embeddings, layers = tower.embeddings, tower.encoder.layers
        position = buckets[:, 0] * embeddings.num_patches_per_side + buckets[:, 1]
        x = patch_convolution(pixel_values.flatten(1), embeddings.patch_embedding)
        x = x + embeddings.position_embedding(position)
        states: list[Tensor] = []
        normed = siglip_layers(
            layers, x, tower.post_layernorm, cu_seqlens, max_seqlen, schedule, attention, states=states
        )
        return output_type(last_hidden_state=normed, **recorded(states, states[-1], output_hidden_states))

    conv = tower.embeddings.patch_embedding.weight
    spec = BufferSpec(
        rows=InputRows("pixel_values", tuple(conv.shape[1:])),
        layout=PictureMask("patch_attention_mask", patch=conv.shape[-1], whole=_reads_padding(tower)),
        buffers=[
            *attention_buffers(tower.encoder.layers[0].self_attn, "item"),
            Lookup("buckets", _Buckets(tower.embeddings), largest=LARGEST),
        ],
        outputs=Fields(last_hidden_state=Rows(), hidden_states=Rows()),
        declared_by="recipe",
    )
    return GraphedEncoder(tower, budgets, spec, forward=forward, **options)


def _reads_padding(tower: Any) -> bool:
    """Return False for Idefics 2, whose connector gets the mask; the others shuffle the pixels of all patches."""
    return not any(cls.__name__ == "Idefics2VisionTransformer" for cls in type(tower).__mro__)


class _Buckets:
    """The position of each patch along a side of some patches, int64 `[patches]` on the CPU.

    Versions of transformers round them in several ways, some in the dtype of the pixels. So the tower's own code
    computes them once, on the CPU: that of its embeddings, for tiles of one column, with patches of one pixel and with
    the number of a position as its embedding.
    """

    def __init__(self, embeddings: Any) -> None:
        self._forward = partial(type(embeddings).forward, SimpleNamespace(
            num_patches_per_side=embeddings.num_patches_per_side,
            patch_size=1,
            patch_embedding=Tensor.double,
            position_embedding=nn.Embedding.from_pretrained(
                torch.arange(embeddings.num_positions, dtype=torch.float64, device="cpu")[:, None]
            ),
        ))  # fmt: skip
        self._side = embeddings.num_patches_per_side
        self._dtype = embeddings.patch_embedding.weight.dtype
        self._all: Tensor | None = None

    def __call__(self, size: int) -> Tensor:
        if self._all is None:
            pixels = torch.zeros(LARGEST, 1, LARGEST, 1, dtype=self._dtype, device="cpu")
            mask = torch.ones(LARGEST, LARGEST, dtype=torch.bool, device="cpu").tril_()[..., None]
            with torch.no_grad():
                self._all = self._forward(pixels, patch_attention_mask=mask)[..., 0].long() // self._side
        return self._all[size - 1, :size]
