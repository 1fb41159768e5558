"""Hooks into SGLang: towers are graphed once a model is loaded, and called through their graphs from then on."""

import inspect
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.capture.mode import BackendName
from varlen_graphs.capture.pool import Pool
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.engines.capture import capture_options
from varlen_graphs.engines.sglang.towers import RECIPES, NativeTower
from varlen_graphs.errors import CaptureError, CompilerError, SpecError, StaleGraphError, VarlenGraphsError
from varlen_graphs.kernels.start import start_triton
from varlen_graphs.shadows.shadow import HOSTS

LOGGER = logging.getLogger("varlen_graphs")

HOSTS.add("sglang.srt.distributed")  # whose groups of ranks layers hold

NAME = "varlen_graphs"
"""Name of the plugin, for `SGLANG_PLUGINS`."""

VERSION = "0.5.23"

REFUSED = "a call that its graphs refuse"
"""Reason of eager runs of calls that the tower answers itself."""

_PLACE = "_varlen_graphs_encoder"
_LOCK = threading.Lock()
_registered = False


def register() -> None:
    """Register the hooks with SGLang, if `SGLANG_PLUGINS` names `varlen_graphs`. SGLang calls it at its start.

    Later calls change nothing. With another version than 0.5.23 it does nothing, and logs that.
    """
    global _registered
    import sglang
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME not in {name.strip() for name in (envs.SGLANG_PLUGINS.get() or "").split(",")}:
        LOGGER.info("varlen_graphs is installed, but off: SGLANG_PLUGINS=%s switches it on", NAME)
        return
    if sglang.__version__ != VERSION:
        LOGGER.error("varlen_graphs does nothing: SGLang is %s, expected %s", sglang.__version__, VERSION)
        return
    with _LOCK:
        if _registered:
            return
        for path in RECIPES:
            HookRegistry.register(f"{path}.forward", _forward, HookType.AROUND)
        loaded = "sglang.srt.model_executor.model_runner.ModelRunner.initialize"
        HookRegistry.register(loaded, _initialize, HookType.AROUND)
        _registered = True


def graph_towers(
    model: nn.Module, budgets: Budgets | None = None, *, backend: BackendName = "cuda", **options: Any
) -> dict[str, GraphedEncoder]:
    """Graph the towers of a loaded model of SGLang, and capture all graphs. The hook calls it after the weights came.

    Towers that share a model share a pool. The hooks must be in place: without them nobody calls the graphs. A model
    whose towers are graphed already is left as it is.

    Args:
        model: The model, or a tower.
        budgets: As for `GraphedEncoder`, in rows.
        backend: `"cuda"`, or `"tape"` on a CPU.
        **options: Other arguments of `GraphedEncoder`, and `attention`, the attention backend.

    Returns:
        The encoders by the paths of their towers in the model.

    Raises:
        SpecError: The model has no such tower, or one that no graph can run as SGLang is configured.
        CaptureError: A tower cannot be captured.
    """
    if graphed := encoders(model):
        return graphed
    towers = {name: module for name, module in model.named_modules() if _path(module) in RECIPES}
    if not towers:
        raise SpecError(
            f"{type(model).__name__} has no vision tower that can be graphed: expected one of the classes "
            f"{', '.join(RECIPES)}"
        )
    for tower in towers.values():
        _check(tower, backend)
    options = {"pool": Pool(), "capture": capture_options(budgets)} | options
    made = {}
    for name, tower in towers.items():
        own = NativeTower(tower, inspect.unwrap(type(tower).forward))
        made[name] = RECIPES[_path(tower)](own, budgets, backend=backend, **options).capture()
    for name, encoder in made.items():
        vars(towers[name])[_PLACE] = encoder  # no submodule: names in the state dict stay as they are
    return made


def encoders(model: nn.Module) -> dict[str, GraphedEncoder]:
    """Return the encoders of a model by the paths of their towers, to read statistics."""
    return {name: vars(module)[_PLACE] for name, module in model.named_modules() if _PLACE in vars(module)}


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _forward(own_forward: Any, tower: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the forward of a tower, which has an answer whatever comes of its graphs."""
    encoder: GraphedEncoder | None = vars(tower).get(_PLACE)
    if encoder is None:
        return own_forward(tower, *args, **kwargs)
    try:
        return encoder(**_arguments(tower, *args, **kwargs))
    except (VarlenGraphsError, torch.OutOfMemoryError, TypeError) as error:
        if isinstance(error, CaptureError | CompilerError | StaleGraphError | torch.OutOfMemoryError):
            vars(tower).pop(_PLACE, None)  # each call would try to capture again
            encoder.release()
            LOGGER.error("%s runs eager from now on: %s", type(tower).__name__, error)
        elif not encoder.stats.eager[REFUSED]:
            LOGGER.warning("a call of %s runs eager: %s", type(tower).__name__, error)
        encoder.stats.count_eager(REFUSED)
        return own_forward(tower, *args, **kwargs)


def _arguments(tower: Any, x: Tensor, grid_thw: Any) -> dict[str, Any]:
    return {"x": x.to(tower.device, non_blocking=True), "grid_thw": grid_thw}


def _initialize(own_initialize: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the initialisation of a model runner: Triton starts while it loads the weights."""
    if str(runner.device).startswith("cuda"):
        start_triton([torch.empty(0, device=runner.device)])
    result = own_initialize(runner, *args, **kwargs)
    after_initialize(runner)
    return result


def after_initialize(runner: Any) -> None:
    """Graph towers after the runner has loaded its model, and before it sizes its cache by the memory that is left."""
    if runner.is_draft_worker:
        return
    name = type(runner.model).__name__
    try:
        if runner.startup_weight_load is not None:
            raise SpecError(
                "its weights are loaded later (--startup-weight-load-mode overlap): expected them to be there, because "
                "new graphs are compared with the tower; try --startup-weight-load-mode serial"
            )
        for path, encoder in graph_towers(runner.model).items():
            LOGGER.info("%s of %s runs as graphs: %s", path or "the tower", name, encoder)
    except Exception as error:  # whatever it is, the model can be served
        LOGGER.error("the towers of %s run eager: %s", name, error)


def _check(tower: Any, backend: BackendName) -> None:
    """Refuse a tower that graphs cannot run as SGLang is configured."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_exec

    name, promised = type(tower).__name__, get_exec().deterministic
    if envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.get():
        raise SpecError(
            f"SGLang's own graphs of {name} are on (SGLANG_VIT_ENABLE_CUDA_GRAPH=1): expected them off, because one "
            "tower cannot have both; unset the variable to use varlen_graphs, or take it from SGLANG_PLUGINS"
        )
    ranks = max(_ranks(tower))
    if ranks > 1:
        raise SpecError(
            f"{name} is sharded over {ranks} ranks, whose collectives of SGLang are not captured: expected a whole "
            "tower on each rank; try --mm-enable-dp-encoder"
        )
    if promised.enable_deterministic_inference or promised.rl_on_policy_target is not None:
        raise SpecError(
            "SGLang is to give the same bits whatever is in a batch (--enable-deterministic-inference or "
            f"--rl-on-policy-target): expected neither, because the last bits of {name} depend on the size of the "
            "graph; leave varlen_graphs out of SGLANG_PLUGINS"
        )
    if backend == "cuda" and tower.device.type != "cuda":
        raise SpecError(
            f"the weights of {name} are on {tower.device}: expected them on a GPU, for backend='cuda'; try "
            "backend='tape' on a CPU"
        )


def _ranks(tower: nn.Module) -> Iterator[int]:
    """Return the number of ranks of each layer that knows it: linear layers their group, others their number."""
    for part in tower.modules():
        if part is not tower:  # a tower counts the ranks of the language model
            yield getattr(getattr(part, "tp_group", None), "world_size", 1)
            yield getattr(part, "tp_size", 1)
