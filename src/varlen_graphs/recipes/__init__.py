"""Recipes: the declaration of a family of towers, one thin file each.

To add a recipe, write one file with a function decorated by `register`, and import the function here.
"""

from varlen_graphs.recipes.by_batch import by_batch
from varlen_graphs.recipes.by_call import by_call
from varlen_graphs.recipes.cosmos3_edge import cosmos3_edge
from varlen_graphs.recipes.flattened_patches import flattened_patches
from varlen_graphs.recipes.gemma4 import gemma4
from varlen_graphs.recipes.generic import generic
from varlen_graphs.recipes.glm4v import glm4v
from varlen_graphs.recipes.glm_image import glm_image
from varlen_graphs.recipes.hunyuan_vl import hunyuan_vl
from varlen_graphs.recipes.idefics import idefics
from varlen_graphs.recipes.inkling2 import inkling2
from varlen_graphs.recipes.lfm3_vl import lfm3_vl
from varlen_graphs.recipes.minicpmv import minicpmv, pack_slices
from varlen_graphs.recipes.minicpmv4_6 import minicpmv4_6
from varlen_graphs.recipes.minicpmv_model import minicpmv_model
from varlen_graphs.recipes.packed_text import packed_text
from varlen_graphs.recipes.pixtral import pixtral
from varlen_graphs.recipes.qwen2_5_vl import qwen2_5_vl
from varlen_graphs.recipes.qwen2_vl import qwen2_vl
from varlen_graphs.recipes.qwen3_asr import qwen3_asr
from varlen_graphs.recipes.qwen3_omni_audio import qwen3_omni_audio
from varlen_graphs.recipes.qwen3_vl import qwen3_vl
from varlen_graphs.recipes.radio import radio
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.resampler import resampler
from varlen_graphs.recipes.siglip2 import siglip2
from varlen_graphs.recipes.speech import speech
from varlen_graphs.recipes.speech_encoder import SpeechEncoder
from varlen_graphs.recipes.text_encoder import TextEncoder
from varlen_graphs.recipes.video_llama3 import video_llama3

__all__ = [
    "SpeechEncoder",
    "TextEncoder",
    "by_batch",
    "by_call",
    "cosmos3_edge",
    "flattened_patches",
    "gemma4",
    "generic",
    "glm4v",
    "glm_image",
    "hunyuan_vl",
    "idefics",
    "inkling2",
    "lfm3_vl",
    "minicpmv",
    "minicpmv4_6",
    "minicpmv_model",
    "pack_slices",
    "packed_text",
    "pixtral",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_asr",
    "qwen3_omni_audio",
    "qwen3_vl",
    "radio",
    "register",
    "resampler",
    "siglip2",
    "speech",
    "video_llama3",
]
