"""A whole model MiniCPM-V, whose method `get_vllm_embedding` runs its vision transformer and its resampler.

Follows `modeling_minicpmv.py`, which comes with the weights of MiniCPM-V 2.5, 2.6, 4.0 and 4.5.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.budgets.ladder import Budgets
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError
from varlen_graphs.recipes.families.minicpmv import MiniCPMVTower, minicpmv, pack_slices, takes_sizes
from varlen_graphs.recipes.families.resampler import is_temporal
from varlen_graphs.recipes.registry import METHODS, Method, register
from varlen_graphs.recipes.towers import check_parts

PARTS = ("vpm", "resampler", "get_vllm_embedding", "config")
FEATURES = "vision_hidden_states"


@register("MiniCPMV")
def minicpmv_model(model: Any, budgets: Budgets | None = None, **options: Any) -> GraphedEncoder:
    """Graph vision transformer and resampler of a model MiniCPM-V 2.5, 2.6, 4.0 or 4.5.

    The encoder is that of `minicpmv`. Installed by `vg.wrap`, it answers the method `get_vllm_embedding` of the model,
    which `generate`, `chat` and the forward of the model call.

    Args:
        model: The model, of the code that comes with the weights.
        budgets: As for `minicpmv`.
        **options: As for `minicpmv`.

    Raises:
        SpecError: As for `minicpmv`; or the model is MiniCPM-V 2.5 with `batch_vision_input: true`, as it is shipped.
    """
    _check(model)
    return minicpmv(model.vpm, model.resampler, budgets, **options)


def embed(
    model: Any, encoder: GraphedEncoder, original: Callable[..., Any], data: Mapping[str, Any], **kwargs: Any
) -> Any:
    """Return what `get_vllm_embedding` does, with features from the encoder.

    The features of a prompt are as many as it has groups. The original takes as many as it has slices, and so leaves
    out images where prompts with groups of several slices share a batch.
    """
    slices = [] if FEATURES in data else [one for prompt in data["pixel_values"] for one in prompt]
    if not slices:
        return original(data, **kwargs)
    _check(model)
    sizes = torch.vstack([sizes for sizes in data["tgt_sizes"] if isinstance(sizes, Tensor)])
    counts, times = [len(prompt) for prompt in data["pixel_values"]], {}
    if is_temporal(model.resampler) and data.get("temporal_ids") is not None:
        counts = [len(prompt) for prompt in data["temporal_ids"]]
        times = {"temporal_ids": [group for prompt in data["temporal_ids"] for group in prompt]}
    rows = pack_slices(slices).to(next(model.vpm.parameters()).device)
    features = encoder(rows, tgt_sizes=sizes, **times).split(counts)
    return original({**data, FEATURES: [*features]}, **kwargs)


def _parts(model: Any) -> MiniCPMVTower:
    check_parts(model, PARTS, "a model MiniCPM-V 2.5, 2.6, 4.0 or 4.5")
    return MiniCPMVTower(model.vpm, model.resampler)


def _check(model: Any) -> None:
    """Raise a `SpecError` if the model lets slices attend to padding."""
    if not takes_sizes(model.vpm) and getattr(model.config, "batch_vision_input", False):
        raise SpecError(
            f"{type(model).__name__} has batch_vision_input=True, with which slices of 2.5 attend to padding, as "
            "packed ones cannot; set model.config.batch_vision_input = False, so that it encodes them one by one"
        )


METHODS[minicpmv_model] = Method("get_vllm_embedding", _parts, embed)
