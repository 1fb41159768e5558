"""Recipes: the declaration of a family of towers, one thin file each.

To add a recipe, write one file with a function decorated by `handles`, and import the function here.
"""

from varlen_graphs.recipes.by_batch import by_batch
from varlen_graphs.recipes.gemma4 import gemma4
from varlen_graphs.recipes.generic import generic
from varlen_graphs.recipes.glm4v import glm4v
from varlen_graphs.recipes.idefics import idefics
from varlen_graphs.recipes.minicpmv import minicpmv, pack_slices
from varlen_graphs.recipes.packed_text import packed_text
from varlen_graphs.recipes.pixtral import pixtral
from varlen_graphs.recipes.qwen2_5_vl import qwen2_5_vl
from varlen_graphs.recipes.qwen2_vl import qwen2_vl
from varlen_graphs.recipes.qwen3_omni_audio import qwen3_omni_audio
from varlen_graphs.recipes.qwen3_vl import qwen3_vl
from varlen_graphs.recipes.registry import handles
from varlen_graphs.recipes.resampler import resampler
from varlen_graphs.recipes.siglip2 import siglip2
from varlen_graphs.recipes.text_encoder import TextEncoder

__all__ = [
    "TextEncoder",
    "by_batch",
    "gemma4",
    "generic",
    "glm4v",
    "handles",
    "idefics",
    "minicpmv",
    "pack_slices",
    "packed_text",
    "pixtral",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_omni_audio",
    "qwen3_vl",
    "resampler",
    "siglip2",
]
