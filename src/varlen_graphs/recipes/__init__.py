"""Recipes: how a family of towers is declared, one thin file each."""

from varlen_graphs.recipes.generic import generic
from varlen_graphs.recipes.qwen3_omni_audio import qwen3_omni_audio
from varlen_graphs.recipes.qwen3_vl import qwen3_vl
from varlen_graphs.recipes.registry import handles

__all__ = ["generic", "handles", "qwen3_omni_audio", "qwen3_vl"]
