"""Towers of a whole model: which can be graphed and how, and why others cannot."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from varlen_graphs.budgets.ladder import Budgets, PaddedLadder
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError
from varlen_graphs.huggingface.installed import Understood, installed
from varlen_graphs.layouts.batch import Batch
from varlen_graphs.layouts.dtypes import why_not_loaded
from varlen_graphs.recipes.automatic.by_call import by_call
from varlen_graphs.recipes.automatic.ways import (
    WAYS,
    WITH_TEXTS,
    is_candidate,
    is_model,
    is_pair,
    merges_texts,
    understand,
)
from varlen_graphs.recipes.padding_consumers import PaddingConsumers, modules_around
from varlen_graphs.recipes.probe import UnknownCallError
from varlen_graphs.recipes.registry import recipe_for
from varlen_graphs.recipes.sound.speech_encoder import SpeechEncoder
from varlen_graphs.recipes.texts.packed_text import packed_text
from varlen_graphs.torch_dispatch.thread_modes import run_aside

STACKS = (nn.ModuleList, nn.Sequential)
"""Modules that hold layers."""

BudgetsOf = Callable[[str], Budgets | None]
"""Returns the budgets for the tower at a path."""


def find_towers(
    model: nn.Module, budgets_of: BudgetsOf, options: Mapping[str, Any]
) -> tuple[dict[str, Understood], dict[str, str]]:
    """Return the towers of a model by their paths, and why other modules that look like one cannot be graphed.

    Outer modules come first; what is inside a tower belongs to it. What reads texts inside a model that generates, or
    that merges them with images, is no tower, unless it is the encoder of a pair, whose decoder is none. Of what is
    inside a module that cannot be graphed, only models are tried, not their layers. Where nothing but a call tells how
    a module is called, and no tower is inside, it is understood by its first call.

    Raises:
        SpecError: A tower with a recipe for its class cannot be graphed, or a tower is wrapped already.
        BudgetError, TypeError: See `wrap`.
    """
    towers: dict[str, Understood] = {}
    refused: dict[str, str] = {}
    unknown: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    merging: tuple[str, ...] = ()
    encode: set[nn.Module] = set()
    decode: set[nn.Module] = set()
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        if installed(module) is not None:
            raise SpecError(f"{path or type(module).__name__} is wrapped already; call vg.unwrap(model) first")
        if merges_texts(module):
            merging += (f"{path}." if path else "",)
        if is_pair(module):
            encode.add(module.get_encoder())
            decode.add(module.get_decoder())
        merges = path.startswith(merging) and module not in encode
        ways = WAYS if merges or module in decode else WITH_TEXTS
        recipe = recipe_for(module)
        if recipe is not None:
            tower = Understood(module, recipe, declared=True, options={})
            check_weights(path, tower.parts)
            recipe(module, budgets_of(path), **options)  # raises for wrong options before anything is changed
            towers[path] = tower
        elif is_candidate(module, ways) and (is_model(module) or not path.startswith(tuple(f"{p}." for p in refused))):
            try:
                check_weights(path, module)
                found, encoder = run_aside(partial(understand, module, ways, budgets_of(path), **options))
            except SpecError as error:
                refused[path] = str(error)
                if isinstance(error, UnknownCallError):
                    unknown[path] = module
                continue
            around = modules_around(module, model)
            more = {}
            if found is packed_text:
                more = {"around": run_aside(partial(PaddingConsumers.of_texts, around, module))}
            elif isinstance(encoder, SpeechEncoder) and not encoder.alone:  # the others take clips of one length
                more = {"around": run_aside(partial(PaddingConsumers.of_clips, around, module, encoder.spec))}
            towers[path] = Understood(module, found, declared=False, options=more)
        else:
            continue
        inside += (f"{path}." if path else "",)
    for path, module in unknown.items():
        if not any(one.startswith(f"{path}." if path else "") for one in towers):
            _check_options(budgets_of(path), options)
            towers[path] = Understood(module, by_call, declared=False, options={})
            del refused[path]
    return towers, refused


def understood_by_calls(
    model: nn.Module, budgets_of: Callable[[str], Budgets | None], options: Mapping[str, Any]
) -> Iterator[tuple[str, Understood]]:
    """Yield a module that is no model of transformers, and the stacks of layers right inside of it, with their paths.

    The first that is called, and that its call shows how to graph, gets an encoder.

    Raises:
        SpecError: Weights are where no graph can read them.
        BudgetError, TypeError: See `wrap`.
    """
    for path, module in (("", model), *model.named_children()):
        stacks = any(isinstance(part, STACKS) for part in module.modules())
        is_script = isinstance(module, torch.jit.ScriptModule)  # which does not tell its arguments
        runs = not is_script and type(module).forward is not nn.Module.forward
        if runs and next(module.parameters(), None) is not None and (stacks or not path):
            check_weights(path, module)
            _check_options(budgets_of(path), options)
            yield path, Understood(module, by_call, declared=False, options={})


def _check_options(budgets: Budgets | None, options: Mapping[str, Any]) -> None:
    """Raise the error for options or budgets that no encoder of a module that is understood by calls takes."""
    own = {name: one for name, one in options.items() if name != "padded"}
    padded = options.get("padded") or isinstance(budgets, PaddedLadder)
    sizes = None if padded else budgets  # whether batches are padded ones, calls tell
    GraphedEncoder(nn.Identity(), sizes, BufferSpec("input", Batch()), **own)


def check_weights(path: str, tower: nn.Module) -> None:
    """Raise a `SpecError` if the weights of a tower are where no graph can read them."""
    where = path or type(tower).__name__
    own = [vars(part).get("_hf_hook") for part in (tower, *tower.children())]
    hooks = [hook for one in own for hook in (one, *getattr(one, "hooks", ()))]
    if any(getattr(hook, "offload", False) is True or type(hook).__name__ == "CpuOffload" for hook in hooks):
        raise SpecError(
            f"accelerate offloads {where}: its weights move to the GPU for each call, but graphs read them where they "
            "were at capture; keep the tower on one device (device_map={'...visual': 0, ...})"
        )
    if (reason := why_not_loaded(tower)) is not None:
        raise SpecError(f"{path}: {reason}" if path else reason)
    devices = {str(tensor.device) for tensor in (*tower.parameters(), *tower.buffers())}
    if len(devices) != 1:
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
