"""Whole models: their towers found, and graphed in their places."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError
from varlen_graphs.huggingface.installed import Installed, Pools, install, installed
from varlen_graphs.layout.budgets import Budgets
from varlen_graphs.recipes.registry import Recipe, handled, recipe_for

M = TypeVar("M", bound=nn.Module)


def wrap(model: M, budgets: Budgets | Mapping[str, Budgets] | None = None, **options: Any) -> M:
    """Graph the towers of a whole model, in place: `model.generate(...)` goes on as before, and replays graphs.

        model = vg.wrap(AutoModelForImageTextToText.from_pretrained(...).cuda().eval())

    Finds the towers by their classes, and puts an encoder in the place of each tower's `forward`. The towers stay the
    objects they are; `unwrap` leaves exactly what was there. Nothing is captured before the first call, or
    `encoder.capture()` of `encoders(model)`. The encoders of a model share one pool a device.

    Args:
        model: A model, or a tower.
        budgets: As for `GraphedEncoder`; a mapping gives them by the path of the tower, such as `"model.visual"`;
            `None` is what the recipe takes by default.
        **options: Further arguments of `GraphedEncoder`, for all towers.

    Returns:
        The model.

    Raises:
        SpecError: There is no tower that a recipe is for, a tower whose weights do not stay where they are, a path that
            is no tower's, or an option that no encoder takes. Then nothing is changed.
    """
    towers = dict(_towers(model))
    if not towers:
        raise SpecError(
            f"{type(model).__name__} has no tower that a recipe is for; there are recipes for {', '.join(handled())}. "
            "Towers of transformers 5.15 may need none, see docs/generic.md; to write one, see docs/recipes.md; or "
            "wrap a module of your own with GraphedEncoder"
        )
    by_path = budgets if isinstance(budgets, Mapping) else dict.fromkeys(towers, budgets)
    if unknown := sorted(by_path.keys() - towers.keys()):
        raise SpecError(f"budgets are for {unknown}, where no tower is: expected some of {sorted(towers)}")
    for path, (tower, recipe) in towers.items():
        _check(path, tower)
        recipe(tower, by_path.get(path), **options)  # what is wrong with the options shows here
    pools = Pools()
    for path, (tower, recipe) in towers.items():
        install(tower, recipe, by_path.get(path), options, pools)
    return model


def unwrap(model: M) -> M:
    """Undo `wrap`: every tower has the forward it had, and the graphs are freed, after the last replay.

    Returns:
        The model; one that is not wrapped is left as it is.
    """
    for _, one in _installed(model):
        one.remove()
    return model


def encoders(model: nn.Module) -> dict[str, GraphedEncoder]:
    """The encoders of a wrapped model by the paths of their towers: to capture ahead, for reports and counts."""
    return {path: one.encoder for path, one in _installed(model)}


def _installed(model: nn.Module) -> Iterator[tuple[str, Installed]]:
    for path, module in model.named_modules():
        one = installed(module)
        if one is not None:
            yield path, one


def _towers(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, Recipe]]]:
    """The towers of a model, outermost first: what is inside of one belongs to it."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        recipe = recipe_for(module)
        if recipe is not None:
            inside += (f"{path}." if path else "",)
            yield path, (module, recipe)


def _check(path: str, tower: nn.Module) -> None:
    """Whether a tower can be graphed where it is.

    Raises:
        SpecError: It cannot, and why.
    """
    where = path or type(tower).__name__
    if installed(tower) is not None:
        raise SpecError(f"{where} is wrapped already; call vg.unwrap(model) first")
    own = vars(tower)
    hooks = [own.get("_hf_hook"), *getattr(own.get("_hf_hook"), "hooks", ())]
    if any(getattr(hook, "offload", False) is True or type(hook).__name__ == "CpuOffload" for hook in hooks):
        raise SpecError(
            f"accelerate offloads {where}: its weights come to the GPU for each call, and graphs read them where they "
            "were at capture; keep the tower on its device (device_map={'...visual': 0, ...})"
        )
    devices = {str(tensor.device) for tensor in (*tower.parameters(), *tower.buffers())}
    if len(devices) != 1 or devices == {"meta"}:
        raise SpecError(
            f"{where} has weights on {sorted(devices)}: expected all on one device, where they stay; a tower that is "
            "offloaded or spread over devices cannot be graphed"
        )
    if any(getattr(getattr(module, "state", None), "threshold", 0) for module in tower.modules()):
        raise SpecError(
            f"{where} is quantised by bitsandbytes to 8 bits, with a llm_int8_threshold above which it looks for "
            "outliers on the host: no graph can hold that; load the model with llm_int8_threshold=0.0 in its "
            f"BitsAndBytesConfig, in 4 bits, or with llm_int8_skip_modules=['{where}', ...]"
        )
