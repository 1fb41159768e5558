"""Registration with vLLM, once in a process."""

import functools
import threading
import time
from textwrap import shorten
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerWrapperBase

from varlen_graphs.engines.vllm.settings import LINE, read_settings
from varlen_graphs.huggingface.wrap import unwrap
from varlen_graphs.kernels.start import start_triton

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


def _with_hooks(init_device: Any) -> Any:
    """Return an `init_device` of workers that also prepares those of engines that switch the library on."""

    @functools.wraps(init_device)
    def init_and_hook(self: Any) -> Any:
        if read_settings(self.vllm_config) is None:
            return init_device(self)
        result = init_device(self)
        worker = self.worker
        start_triton([torch.empty(0, device=worker.device)])  # while the weights are loaded
        worker.determine_available_memory = _with_captures(worker, self.vllm_config, worker.determine_available_memory)
        return result

    return init_and_hook


def _with_captures(worker: Any, config: Any, determine_available_memory: Any) -> Any:
    """Return a `determine_available_memory` that first graphs the loaded model.

    vLLM compares the free memory after it with that before the model was loaded, so it counts the graphs. Its own
    profiling run would be too late: there it forbids the allocator to split blocks, and graphs would share no memory.
    """

    @functools.wraps(determine_available_memory)
    def capture_and_measure(*args: Any, **kwargs: Any) -> Any:
        try:
            _capture(worker.model_runner, config)
        except Exception as error:  # whatever it is, vLLM can serve the model
            logger.warning("varlen_graphs leaves all towers eager: %s", shorten(str(error), LINE))
        return determine_available_memory(*args, **kwargs)

    return capture_and_measure


def _capture(runner: Any, config: Any) -> None:
    """Graph the towers of the model, and capture all graphs, or none; log what came of it."""
    from vllm.config import set_current_vllm_config

    from varlen_graphs.engines.vllm.graphed import capture_all, graph_towers, log_outcome, needs_calls

    model, start = runner.get_model(), time.perf_counter()
    try:
        with torch.inference_mode():
            graphed = graph_towers(model, config)
            if needs_calls(model, config):
                with set_current_vllm_config(config):
                    runner.profile_run()
                capture_all(model)
    except BaseException:
        unwrap(model)
        raise
    log_outcome(model, config, graphed, start)
