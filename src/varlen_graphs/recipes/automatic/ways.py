"""The ways to understand a tower that no recipe is for, in order, and which modules they are tried on."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import CaptureError, SpecError
from varlen_graphs.recipes.automatic.by_batch import by_batch
from varlen_graphs.recipes.automatic.fixed_sizes import INPUTS
from varlen_graphs.recipes.automatic.flattened_patches import PATCHES, flattened_patches
from varlen_graphs.recipes.automatic.generic import generic
from varlen_graphs.recipes.inspection import LAYOUTS
from varlen_graphs.recipes.probe import UnknownCallError
from varlen_graphs.recipes.registry import Recipe
from varlen_graphs.recipes.sound.speech import speech
from varlen_graphs.recipes.sound.speech_probe import MASK_OF
from varlen_graphs.recipes.texts.packed_text import packed_text
from varlen_graphs.recipes.texts.text_probe import IDS, MASK

SOUND = ("input_features", "input_values")
"""Names that transformers gives to spectrograms and samples."""

MODALITIES = "input_modalities"
"""Attribute of the models of transformers 5 that names the kinds of their inputs."""

MAIN_INPUT = "main_input_name"
"""Attribute of the models of transformers, unlike of their layers."""

OF_LANGUAGE_MODELS = ("input_ids", "cache", "past_key_values", "labels", "mask_labels")
"""Arguments of models that generate, and of those with a loss; `decoder_input_ids` and the like are others."""

LOSSES = ("labels", "mask_labels", "start_positions")
"""Arguments of models with a head."""

PROMPTS = ("input_points", "input_boxes")
"""Arguments of models that segment what they are pointed at: the encoder of images is inside of them."""

OF_ENCODER = "encoder_hidden_states"
"""Argument of decoders that attend to the output of an encoder."""

EMBEDDINGS, GENERATE = "inputs_embeds", "generate"
"""The argument of models that merge embeddings, and the method of those that generate."""


def arguments_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of the forward of a module's class; empty if it does not tell."""
    try:
        parameters = inspect.signature(type(module).forward).parameters
    except (AttributeError, TypeError, ValueError):  # scripts have none
        return {}
    return dict([*parameters.items()][1:])


def caches_of(module: nn.Module) -> list[str]:
    """Return the arguments by which a model carries state from one call to the next; versions name them differently."""
    names = arguments_of(module).items()
    return [name for name, own in names if name == "padding_cache" or "Cache" in str(own.annotation)]


def is_model(module: nn.Module) -> bool:
    """Return True for a model of transformers, unlike its layers."""
    return hasattr(module, MAIN_INPUT)


def is_encoder(module: nn.Module, but: Sequence[str] = ()) -> bool:
    """Return True unless a module is a language model, or has one inside, or takes labels.

    Arguments of the names `but` may be there.
    """
    models = (part for part in module.modules() if is_model(part))
    names = {name for part in (module, *models) for name in arguments_of(part)} - {*but}
    return not any(name in OF_LANGUAGE_MODELS or name.startswith("decoder_") for name in names)


def describes_items(module: nn.Module) -> bool:
    """Return True for towers whose calls describe their items, by a grid or by lengths."""
    return any(name in LAYOUTS for name in arguments_of(module)) and is_encoder(module)


def takes_batch(module: nn.Module) -> bool:
    """Return True for models, and stacks of layers, whose first argument is a batch of images or sound."""
    has_layers = is_model(module) or any(isinstance(part, nn.ModuleList) for part in module.modules())
    names = arguments_of(module)
    first = next(iter(names), "")
    named = first in INPUTS or (first == "hidden_states" and getattr(module, MAIN_INPUT, None) in INPUTS)
    return named and has_layers and is_encoder(module) and not any(name in PROMPTS for name in names)


def hears_clips(module: nn.Module) -> bool:
    """Return True for models of sound that take a mask, or sound alone."""
    names, modalities = arguments_of(module), getattr(module, MODALITIES, None) or ()
    of_sound = next(iter(names), "") in SOUND or "audio" in modalities
    takes_clips = any(MASK_OF in name for name in names) or modalities == "audio"
    return is_model(module) and of_sound and takes_clips and is_encoder(module)


def hears_streams(module: nn.Module) -> bool:
    """Return True for encoders of sound that carry state from one chunk to the next."""
    names = arguments_of(module)
    of_sound = next(iter(names), "") in SOUND or getattr(module, MAIN_INPUT, None) in SOUND
    caches = caches_of(module)
    encodes = OF_ENCODER not in names and is_encoder(module, but=caches)
    return is_model(module) and of_sound and bool(caches) and encodes


def called_in_streams(tower: nn.Module, budgets: Budgets | None = None, **options: Any) -> NoReturn:
    """Refuse to guess a call of an encoder of streams that no other recipe graphs.

    Raises:
        UnknownCallError: Always.
    """
    carried = " and ".join(sorted(caches_of(tower)))
    raise UnknownCallError(
        f"{type(tower).__name__} takes {carried}: calls that carry state from one chunk of sound to the next bring it "
        "in tensors of the caller, which a graph cannot follow; calls without it may be graphed"
    )


def reads_texts(module: nn.Module) -> bool:
    """Return True for models that take token ids and a mask, without a head, that are no decoders beside an encoder."""
    names = arguments_of(module)
    heads = any(name in LOSSES or name.startswith("decoder_") or name in INPUTS for name in names)
    decodes = OF_ENCODER in names and getattr(getattr(module, "config", None), "is_decoder", False)
    return is_model(module) and next(iter(names), "") == IDS and MASK in names and not heads and not decodes


def merges_texts(module: nn.Module) -> bool:
    """Return True for models that generate, or that hand the embeddings of texts on with others: no texts inside."""
    names = arguments_of(module)
    return _generates(module) or (EMBEDDINGS in names and any(name in INPUTS for name in names))


def is_pair(module: nn.Module) -> bool:
    """Return True for models of an encoder and a decoder of texts, such as BART and T5."""
    names = arguments_of(module)
    takes_texts = next(iter(names), "") == IDS and f"decoder_{IDS}" in names and not any(one in INPUTS for one in names)
    has_parts = hasattr(module, "get_encoder") and hasattr(module, "get_decoder")
    is_set = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return is_model(module) and takes_texts and has_parts and bool(is_set)


def _generates(module: nn.Module) -> bool:
    own = getattr(module, "get_base_model", None)  # peft's classes generate around any model
    return hasattr(type(module if own is None else own()), GENERATE)


def reads_flattened_patches(module: nn.Module) -> bool:
    """Return True for the towers of Pix2Struct and Kosmos 2.5."""
    return is_model(module) and next(iter(arguments_of(module)), "") == PATCHES and is_encoder(module)


Ways = list[tuple[Callable[[nn.Module], bool], Recipe]]
"""Tests of a module that run nothing, with recipes to try on it if they hold, which raise `SpecError` if they fail."""

WAYS: Ways = [
    (describes_items, generic), (takes_batch, by_batch), (hears_clips, speech), (hears_streams, called_in_streams),
    (reads_flattened_patches, flattened_patches),
]  # fmt: skip

WITH_TEXTS: Ways = [*WAYS, (reads_texts, packed_text)]


def is_candidate(module: nn.Module, ways: Ways) -> bool:
    """Return True if some way may understand a module."""
    return any(applies(module) for applies, _ in ways)


def understand(
    tower: nn.Module, ways: Ways, budgets: Budgets | None = None, **options: Any
) -> tuple[Recipe, GraphedEncoder]:
    """Return the first recipe that graphs a tower, and an encoder that it made.

    Raises:
        UnknownCallError: None does, one of them would need to know a call, and no run did what no graph can hold.
        SpecError: None does; the message has the reason of each.
    """
    refusals: dict[str, SpecError] = {}
    for applies, recipe in ways:
        if applies(tower):
            try:
                encoder = recipe(tower, budgets, **options)
            except SpecError as error:
                refusals[recipe.__name__] = error
            else:
                return recipe, encoder
    reasons = "; ".join(f"{name}: {error}" for name, error in refusals.items())
    # A tower does in its calls what it does in runs of a recipe: if no graph can hold these, none can hold its calls.
    can_run = not any(isinstance(error.__cause__, CaptureError) for error in refusals.values())
    if can_run and any(isinstance(error, UnknownCallError) for error in refusals.values()):
        raise UnknownCallError(reasons)
    raise SpecError(reasons or f"{type(tower).__name__} takes neither items, nor a batch, nor texts")
