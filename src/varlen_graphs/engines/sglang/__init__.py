"""Plugin for SGLang 0.5.23: the vision towers of Qwen2.5-VL, Qwen3-VL and GLM-4.1V as graphs.

    SGLANG_PLUGINS=varlen_graphs python -m sglang.launch_server --model-path Qwen/Qwen3-VL-8B-Instruct

Importing it imports nothing of SGLang.
"""

from varlen_graphs.engines.sglang.plugin import encoders, graph_towers, register

__all__ = ["encoders", "graph_towers", "register"]
