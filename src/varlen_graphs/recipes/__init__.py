"""Recipes: the declaration of a family of towers, one thin file each in `families`; and what needs none by name.

To add a recipe, write one file with a function decorated by `register`, and import the function here.
"""

from varlen_graphs.recipes.automatic.by_batch import by_batch
from varlen_graphs.recipes.automatic.by_call import by_call
from varlen_graphs.recipes.automatic.flattened_patches import flattened_patches
from varlen_graphs.recipes.automatic.generic import generic
from varlen_graphs.recipes.families.cosmos3_edge import cosmos3_edge
from varlen_graphs.recipes.families.gemma4 import gemma4
from varlen_graphs.recipes.families.glm4v import glm4v
from varlen_graphs.recipes.families.glm_image import glm_image
from varlen_graphs.recipes.families.hunyuan_vl import hunyuan_vl
from varlen_graphs.recipes.families.idefics import idefics
from varlen_graphs.recipes.families.inkling2 import inkling2
from varlen_graphs.recipes.families.lfm3_vl import lfm3_vl
from varlen_graphs.recipes.families.minicpmv import minicpmv, pack_slices
from varlen_graphs.recipes.families.minicpmv4_6 import minicpmv4_6
from varlen_graphs.recipes.families.minicpmv_model import minicpmv_model
from varlen_graphs.recipes.families.pixtral import pixtral
from varlen_graphs.recipes.families.qwen2_5_vl import qwen2_5_vl
from varlen_graphs.recipes.families.qwen2_vl import qwen2_vl
from varlen_graphs.recipes.families.qwen3_asr import qwen3_asr
from varlen_graphs.recipes.families.qwen3_omni_audio import qwen3_omni_audio
from varlen_graphs.recipes.families.qwen3_vl import qwen3_vl
from varlen_graphs.recipes.families.radio import radio
from varlen_graphs.recipes.families.resampler import resampler
from varlen_graphs.recipes.families.siglip2 import siglip2
from varlen_graphs.recipes.families.video_llama3 import video_llama3
from varlen_graphs.recipes.registry import register
from varlen_graphs.recipes.sound.speech import speech
from varlen_graphs.recipes.sound.speech_encoder import SpeechEncoder
from varlen_graphs.recipes.texts.packed_text import packed_text
from varlen_graphs.recipes.texts.text_encoder import TextEncoder

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
