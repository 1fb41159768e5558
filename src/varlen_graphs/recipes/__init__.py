"""Recipes: how a family of towers is declared, one thin file each."""

from varlen_graphs.recipes.qwen3_vl import qwen3_vl

__all__ = ["qwen3_vl"]
