"""Wrapping of whole models: find their towers and graph each in place."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError
from varlen_graphs.huggingface.installed import Installed, Pools, install, installed
from varlen_graphs.layout.budgets import Budgets
from varlen_graphs.layout.values import quoted
from varlen_graphs.recipes.registry import Recipe, handled, recipe_for

M = TypeVar("M", bound=nn.Module)


def wrap(model: M, budgets: Budgets | Mapping[str, Budgets] | None = None, **options: Any) -> M:
    """Graph the towers of a whole model in place. `model.generate(...)` works as before, and replays graphs.

        model = vg.wrap(AutoModelForImageTextToText.from_pretrained(...).cuda().eval())

    Finds the towers by their classes and puts an encoder in place of each tower's `forward`. The towers remain the same
    objects, and `unwrap` restores exactly what was there. Graphs are captured at the first call, or by
    `encoder.capture()` for the `encoders(model)`. The encoders of a model share one pool per device.

    Args:
        model: A model, or a tower.
        budgets: As for `GraphedEncoder`, for all towers; or a mapping from the path of a tower, such as
            `"model.visual"`, to its budgets. `None`, or a tower without an entry, uses the default of the recipe.
        **options: Other arguments of `GraphedEncoder` for all towers, such as `backend`, `memory`, `capture` or
            `verify`.

    Returns:
        The model.

    Raises:
        SpecError: The model is not a module or has no tower with a recipe, the weights of a tower are offloaded, spread
            over devices or quantised so that no graph can read them, `budgets` has a path without a tower, or a tower
            is wrapped already. Nothing is changed.
        BudgetError: No item can use a budget. Nothing is changed.
        TypeError: `GraphedEncoder` has no such option. Nothing is changed.
    """
    _check_model(model)
    towers = dict(_towers(model))
    if not towers:
        raise SpecError(
            f"{type(model).__name__} has no tower that a recipe is for: expected one of {', '.join(handled())}. Towers "
            "of transformers 5.15 or newer may need no recipe, see docs/generic.md; to write one, see docs/recipes.md; "
            "or wrap a module of your own with GraphedEncoder"
        )
    by_path = budgets if isinstance(budgets, Mapping) else dict.fromkeys(towers, budgets)
    if unknown := sorted(by_path.keys() - towers.keys()):
        raise SpecError(f"budgets are for {unknown}, which are no towers: expected paths among {sorted(towers)}")
    for path, (tower, recipe) in towers.items():
        _check(path, tower)
        recipe(tower, by_path.get(path), **options)  # raises for wrong options before anything is changed
    pools = Pools()
    for path, (tower, recipe) in towers.items():
        install(tower, recipe, by_path.get(path), options, pools)
    return model


def unwrap(model: M) -> M:
    """Undo `wrap`: restore every tower's forward, and free the graphs after the last replay.

    Args:
        model: A model; one that is not wrapped is left unchanged.

    Returns:
        The model.
    """
    _check_model(model)
    for _, encoder in _installed(model):
        encoder.remove()
    return model


def encoders(model: nn.Module) -> dict[str, GraphedEncoder]:
    """Return the encoders of a wrapped model by the paths of their towers, to capture early or to read statistics.

    Args:
        model: A model; one that is not wrapped has no encoders.
    """
    _check_model(model)
    return {path: found.encoder for path, found in _installed(model)}


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise SpecError(f"got {quoted(model)} as model: expected a torch.nn.Module, not {type(model).__name__}")


def _installed(model: nn.Module) -> Iterator[tuple[str, Installed]]:
    for path, module in model.named_modules():
        found = installed(module)
        if found is not None:
            yield path, found


def _towers(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, Recipe]]]:
    """Yield the paths, towers and recipes of a model; modules inside a tower belong to it."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        recipe = recipe_for(module)
        if recipe is not None:
            inside += (f"{path}." if path else "",)
            yield path, (module, recipe)


def _check(path: str, tower: nn.Module) -> None:
    """Raise a `SpecError` if a tower cannot be graphed in place."""
    where = path or type(tower).__name__
    if installed(tower) is not None:
        raise SpecError(f"{where} is wrapped already; call vg.unwrap(model) first")
    own = vars(tower)
    hooks = [own.get("_hf_hook"), *getattr(own.get("_hf_hook"), "hooks", ())]
    if any(getattr(hook, "offload", False) is True or type(hook).__name__ == "CpuOffload" for hook in hooks):
        raise SpecError(
            f"accelerate offloads {where}: its weights move to the GPU for each call, but graphs read them where they "
            "were at capture; keep the tower on one device (device_map={'...visual': 0, ...})"
        )
    devices = {str(tensor.device) for tensor in (*tower.parameters(), *tower.buffers())}
    if len(devices) != 1 or devices == {"meta"}:
        raise SpecError(
            f"{where} has weights on {sorted(devices)}: expected all on one device; load the tower onto one, because "
            "a tower that is offloaded or spread over devices cannot be graphed"
        )
    if any(getattr(getattr(module, "state", None), "threshold", 0) for module in tower.modules()):
        raise SpecError(
            f"{where} is quantised by bitsandbytes to 8 bits, with a llm_int8_threshold above which it looks for "
            "outliers on the host, which no graph can hold; load the model with llm_int8_threshold=0.0 in its "
            f"BitsAndBytesConfig, in 4 bits, or with llm_int8_skip_modules=['{where}', ...]"
        )
