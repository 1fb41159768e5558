"""Graphed towers of a loaded model of vLLM."""

import time
from collections.abc import Callable, Iterator
from textwrap import shorten

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.transformers.multimodal import MultiModalMixin

from varlen_graphs.capture.mode import DISABLED, is_disabled
from varlen_graphs.engines.capture import capture_options
from varlen_graphs.engines.vllm.blocks import called_layers
from varlen_graphs.engines.vllm.settings import LINE, Settings, read_settings
from varlen_graphs.engines.vllm.towers import TOWERS
from varlen_graphs.errors import SpecError, counted
from varlen_graphs.huggingface.encoders import Encoders
from varlen_graphs.huggingface.installed import Installed, installed
from varlen_graphs.huggingface.wrap import encoders, unwrap, wrap
from varlen_graphs.shadows.shadow import HOSTS

logger = init_logger("vllm.varlen_graphs")

HOSTS.add("vllm.config")  # which layers hold, and the engine writes to


def graph_towers(model: nn.Module, config: VllmConfig) -> Encoders:
    """Graph the towers of a loaded model in place, and capture those with a recipe; log why others cannot be graphed.

    Towers of vLLM's own are graphed by the recipes of this package; those of its Transformers backend by `wrap`.
    Whatever cannot be graphed runs as before. A model whose towers are graphed already is left as it is.

    Args:
        model: The model.
        config: The configuration of the engine.

    Returns:
        The encoders by the paths of their towers, and why others run eager.
    """
    settings = read_settings(config)
    if settings is None:
        return Encoders({})
    reasons = {path: _wrap(path, module, config, settings) for path, module in _wrappable(model)}
    found = encoders(model)
    found.eager |= {path: reason for path, reason in reasons.items() if reason is not None}
    if not found and not found.eager:
        logger.warning(
            "varlen_graphs is switched on, but %s has no tower that it graphs: expected one of %s, or vLLM's "
            "Transformers backend; try --model-impl transformers",
            type(model).__name__,
            ", ".join(TOWERS),
        )
    return found


def _wrappable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules to wrap that are not wrapped yet: the towers, or the model inside the Transformers backend."""
    if isinstance(model, MultiModalMixin):
        if not encoders(model):
            yield "model", model.model
        return
    for path, module in model.named_modules():
        if type(module).__name__ in TOWERS and installed(module) is None:
            yield path, module


def _wrap(path: str, module: nn.Module, config: VllmConfig, settings: Settings) -> str | None:
    """Wrap a module and capture its towers; if one cannot be graphed, none is: return and log the reason."""
    reason = _why_eager(config)
    options = {"capture": capture_options(settings.budgets)} | settings.options | {"eager_if": _always(reason)}
    try:
        if type(module).__name__ in TOWERS:
            _check(module)
            _log_called_layers(path, module)
            if config.model_config.multimodal_config.mm_device_do_normalize:
                options["row_dtype"] = torch.uint8
        wrap(module, settings.budgets, **options)
        for one in _installed(module):
            _check(one.module)
            # Towers found by trying may be called with other arguments, and some recipes learn the shape of rows from a
            # call: `capture_all` sees those.
            if reason is None and one.tower.declared and one.encoder.spec.row_input.shape is not None:
                one.encoder.capture()
            one.falls_back = True  # an error would end the engine
    except Exception as error:  # whatever it is, vLLM can serve the model
        unwrap(module)
        logger.warning("varlen_graphs leaves %s eager: %s", path, shorten(str(error), LINE))
        return str(error)
    return None


def _log_called_layers(path: str, tower: nn.Module) -> None:
    if called := called_layers(tower):
        logger.info(
            "varlen_graphs calls %s of %s, such as %s, instead of fusing what is around: they are quantised, or have "
            "adapters or hooks",
            counted(len(called), "linear layer"),
            path,
            called[0],
        )


def log_outcome(model: nn.Module, config: VllmConfig, graphed: Encoders, start: float) -> None:
    """Log, in a line each, what is graphed and at what price, and what was asked for and is not.

    Args:
        model: The model.
        config: The configuration of the engine.
        graphed: The encoders of the model.
        start: Time of `time.perf_counter` before they were made.
    """
    seconds, name = time.perf_counter() - start, type(model).__name__
    for path, encoder in graphed.items():
        store = encoder.executor.store
        rows = [budget.rows for graphs in store.sets for budget in graphs.budgets]
        if not rows:
            reasons = [_why_eager(config), *encoder.disabled.values(), "the engine was not profiled with calls of it"]
            why = shorten(next(filter(None, reasons)), LINE)
            logger.warning("varlen_graphs has no graphs for %s of %s: %s", path, name, why)
            continue
        waiting = [one for one in store.budgets.enabled if not any(one in graphs for graphs in store.sets)]
        logger.info(
            "varlen_graphs runs %s of %s as %s of %d to %d rows, made in %.1f s, which hold %.0f MiB%s",
            path, name, counted(len(rows), "CUDA graph"), min(rows), max(rows), seconds,
            encoder.bytes() / 2**20, f"; calls capture up to {len(waiting)} more" if waiting else "",
        )  # fmt: skip
        missing = {one: why for one, why in encoder.disabled.items() if one not in store.budgets.left_out}
        for budget, why in missing.items():
            logger.warning("varlen_graphs uses no graph of %d rows for %s: %s", budget.rows, path, shorten(why, LINE))
    logger.debug("%s", graphed.report(detail=True))


def needs_calls(model: nn.Module, config: VllmConfig) -> bool:
    """Return True if towers are graphed that learn from calls what they have to capture."""
    return _why_eager(config) is None and any(not len(one.encoder.executor.store) for one in _installed(model))


def capture_all(model: nn.Module) -> None:
    """Capture all graphs for the static arguments of calls so far, so that later calls capture none."""
    for encoder in encoders(model).values():
        encoder.capture_again()


def _installed(model: nn.Module) -> list[Installed]:
    found = (installed(module) for module in model.modules())
    return [one for one in found if one is not None]


def _why_eager(config: VllmConfig) -> str | None:
    """Return why towers run eager in this engine, or `None`."""
    if is_disabled():
        return DISABLED
    multimodal = config.model_config.multimodal_config
    if multimodal is not None and multimodal.is_multimodal_pruning_enabled():
        return "vLLM prunes video tokens by their content"
    if config.lora_config is not None and config.lora_config.enable_tower_connector_lora:
        return "vLLM applies LoRA adapters to the tower"
    return None


def _always(reason: str | None) -> Callable[[nn.Module], str] | None:
    return None if reason is None else lambda tower: reason


def _check(tower: nn.Module) -> None:
    """Check that graphs can hold a tower of vLLM's layers, and compute its attention.

    Raises:
        SpecError: It is sharded, or its attention is in FP8, or another plugin's.
    """
    for path, part in tower.named_modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear) and part.tp_size > 1:
            raise SpecError(
                f"{path} is sharded over {part.tp_size} GPUs, and its collectives are vLLM's own, which no graph of "
                "this library holds: expected a whole tower on each GPU; for towers of vLLM's own, try "
                "--mm-encoder-tp-mode data"
            )
        if isinstance(part, MMEncoderAttention) and type(part) is not MMEncoderAttention:
            raise SpecError(
                f"{path} is another plugin's attention, {type(part).__qualname__}, where graphs have varlen_attention: "
                "expected vLLM's; try VLLM_PLUGINS to choose one of the plugins"
            )
        if isinstance(part, MMEncoderAttention) and part.fp8_enabled:
            raise SpecError(
                f"the attention of {path} is in FP8, and that of graphs in the dtype of the tower: expected that; try "
                "mm_encoder_attn_dtype=auto"
            )
