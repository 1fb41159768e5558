"""The plugin for vLLM 0.33: its vision towers as CUDA graphs.

vLLM loads installed plugins in every process and calls `register`. Nothing changes for engines whose configuration does
not switch the library on:

    vllm serve Qwen/Qwen3-VL-8B-Instruct --additional-config '{"varlen_graphs": true}'
"""

__all__ = ["register"]

VERSION = "0.33."


def register() -> None:
    """Register the hook that prepares workers of engines that switch the library on; once, however often it is called.

    The entry point `vllm.general_plugins`. Imports parts of vLLM and does not initialise CUDA. With another version
    than 0.33 it does nothing, and logs that.
    """
    import vllm

    if not vllm.__version__.startswith(VERSION):
        from vllm.logger import init_logger

        init_logger("vllm.varlen_graphs").warning(
            "varlen_graphs does nothing: vLLM is %s, expected %sx; try pip install vllm==0.33.0",
            vllm.__version__,
            VERSION,
        )
        return
    from varlen_graphs.engines.vllm.plugin import register_once

    register_once()
