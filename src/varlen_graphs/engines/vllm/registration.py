"""Registration with vLLM, once in a process."""

import functools
import threading
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerWrapperBase

from varlen_graphs.engines.vllm.settings import read_settings

ATTENTION = "MMEncoderAttention"

logger = init_logger("vllm.varlen_graphs")

_LOCK = threading.Lock()
_HOOKED: list[type] = []
"""Classes whose method was replaced."""


def register_once() -> None:
    """Hook into the initialisation of workers; nothing if that has been done."""
    with _LOCK:
        if WorkerWrapperBase not in _HOOKED:
            _HOOKED.append(WorkerWrapperBase)
            WorkerWrapperBase.init_device = _with_hooks(WorkerWrapperBase.init_device)


def register_attention() -> None:
    """Register `varlen_attention` for vLLM's encoders, unless another plugin has registered an attention."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    from varlen_graphs.engines.vllm.attention import VarlenAttention

    with _LOCK:
        registered = op_registry_oot.get(ATTENTION)
        if registered is None:
            CustomOp.register_oot(VarlenAttention, name=ATTENTION)
    if registered not in (None, VarlenAttention):
        logger.warning(
            "varlen_graphs graphs no towers of vLLM's own, because another plugin has registered %s as %s: expected "
            "none; try VLLM_PLUGINS to choose one of them",
            registered.__qualname__,
            ATTENTION,
        )


def _with_hooks(init_device: Any) -> Any:
    """Return an `init_device` of workers that also prepares those of engines that switch the library on."""

    @functools.wraps(init_device)
    def init_and_hook(self: Any) -> Any:
        if read_settings(self.vllm_config) is None:
            return init_device(self)
        register_attention()
        result = init_device(self)
        runner = self.worker.model_runner
        runner.profile_run = _with_captures(runner, self.vllm_config, runner.profile_run)
        return result

    return init_and_hook


def _with_captures(runner: Any, config: Any, profile_run: Any) -> Any:
    """Return a profiling run that graphs the loaded model, so that vLLM measures the memory of the graphs."""

    @functools.wraps(profile_run)
    def capture_and_profile(*args: Any, **kwargs: Any) -> Any:
        from varlen_graphs.engines.vllm.graphed import capture_all, graph_towers

        model = runner.get_model()
        graph_towers(model, config)
        result = profile_run(*args, **kwargs)
        capture_all(model)
        return result

    return capture_and_profile
