"""Wrapping of whole models: find their towers and graph each in place."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import SpecError
from varlen_graphs.huggingface.encoders import Encoders
from varlen_graphs.huggingface.installed import Installed, Shared, install, installed
from varlen_graphs.huggingface.towers import find_towers, understood_by_calls
from varlen_graphs.huggingface.versions import note_version
from varlen_graphs.options.capture import Capture
from varlen_graphs.recipes.automatic.ways import is_model
from varlen_graphs.recipes.registry import handled

M = TypeVar("M", bound=nn.Module)


def wrap(model: M, budgets: Budgets | Mapping[str, Budgets] | None = None, **options: Any) -> M:
    """Graph the towers of a whole model in place. `model.generate(...)` works as before, and replays graphs.

        model = vg.wrap(AutoModelForImageTextToText.from_pretrained(...).cuda().eval())
        print(vg.encoders(model).report())

    Finds the towers and puts an encoder in place of each tower's `forward`. A tower is understood by the recipe for its
    class; else by `recipes.generic`, if it describes its items; else by `recipes.by_batch`, if it takes a batch; else
    by `recipes.speech`, if it takes clips with a mask; else by `recipes.flattened_patches`, if it takes patches with
    their rows and columns; else, where the model neither generates nor merges texts with images, and for the encoder of
    a pair, by `recipes.packed_text`, if it reads texts. The last five run the tower, never a language model that
    generates, on a few small inputs, and check that the outputs are equal. A tower whose inputs nothing describes, and
    a model that is not one of transformers, are understood by their first call, by `recipes.by_call`. The towers remain
    the same objects, and `unwrap` restores exactly what was there. Graphs are captured as calls need them, or all by
    `encoder.capture()` for the `encoders(model)`. The encoders of a model share one pool per device.

    Calls that a tower without a recipe takes, but that were not understood (an undeclared mask), run eager, with a
    warning and the reason in `stats`.

    Args:
        model: A model, or a tower. Towers without a recipe should be in evaluation mode.
        budgets: As for `GraphedEncoder`, for all towers; or a mapping from the path of a tower, such as
            `"model.visual"`, to its budgets. `None`, or a tower without an entry, uses the default of the recipe.
        **options: Other arguments of `GraphedEncoder` for all towers, such as `backend`, `memory`, `capture` or
            `verify`; for a model that its first call tells, `padded` of `recipes.by_call`, too.

    Returns:
        The model.

    Raises:
        SpecError: The model is not a module or has no tower that can be graphed; the message has the reasons. The
            weights of a tower with a recipe are offloaded, spread over devices or quantised so that no graph can read
            them, `budgets` has a path without a tower, or a tower is wrapped already. Nothing is changed.
        BudgetError: No item can use a budget. Nothing is changed.
        TypeError: `GraphedEncoder` has no such option. Nothing is changed.
    """
    _check_model(model)
    note_version()
    by_path: Mapping[str, Budgets] = budgets if isinstance(budgets, Mapping) else {}
    for_all = None if isinstance(budgets, Mapping) else budgets
    without_file = _capturing(options, warmup=None)

    def budgets_of(path: str) -> Budgets | None:
        return by_path.get(path, for_all)

    towers, refused = find_towers(model, budgets_of, without_file)
    if not (towers or refused or is_model(model)):
        towers = dict(understood_by_calls(model, budgets_of, without_file))
    if not towers:
        raise SpecError(_no_tower(model, refused))
    if unknown := sorted(by_path.keys() - towers.keys()):
        raise SpecError(f"budgets are for {unknown}, which are no towers: expected paths among {sorted(towers)}")
    shared = Shared(eager=refused)
    for path, tower in towers.items():
        install(tower, budgets_of(path), _capturing(options, path), shared)
    return model


def _capturing(options: dict[str, Any], path: str = "", **changes: Any) -> dict[str, Any]:
    """Return options with changes of their `capture`, and a section of its warm-up file for the tower at a path."""
    capture = options.get("capture", Capture())
    if not isinstance(capture, Capture):
        return options
    section = ".".join(filter(None, (capture.section, path))) or None
    return options | {"capture": replace(capture, section=section, **changes)}


def _no_tower(model: nn.Module, refused: Mapping[str, str]) -> str:
    """Return the message for a model without a tower."""
    name = type(model).__name__
    remedy = "to write a recipe, see docs/recipes.md; or wrap a module of your own with GraphedEncoder"
    if refused:
        reasons = "".join(f"\n  {path or name}: {reason}" for path, reason in refused.items())
        return f"{name} has no tower that can be graphed:{reasons}\n{remedy}"
    if isinstance(model, torch.jit.ScriptModule):
        return (
            f"{name} is compiled by torch.jit, and does not tell its arguments: expected a module of Python; wrap the "
            "one that it was made of"
        )
    return (
        f"{name} has no tower: expected one with a recipe ({', '.join(handled())}), or a module whose forward takes "
        f"images, sound, texts or items, see docs/models.md; {remedy}"
    )


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


def encoders(model: nn.Module) -> Encoders:
    """Return the encoders of a wrapped model by the paths of their towers, to capture early or to read statistics.

    `encoders(model).report()` also shows how each tower was understood, and which parts stay eager and why.

    Args:
        model: A model; one that is not wrapped has no encoders.
    """
    _check_model(model)
    return Encoders(dict(_installed(model)))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise SpecError(f"got {quoted(model)} as model: expected a torch.nn.Module, not {type(model).__name__}")


def _installed(model: nn.Module) -> Iterator[tuple[str, Installed]]:
    for path, module in model.named_modules():
        found = installed(module)
        if found is not None:
            yield path, found
