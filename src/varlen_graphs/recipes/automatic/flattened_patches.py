"""Recipe for towers whose patches begin with their line and column: Pix2Struct and Kosmos 2.5."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, PaddedLadder
from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES, asked_by_config, declares_hidden_states
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import SpecError, VarlenGraphsError
from varlen_graphs.inputs.extra import PerRow
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.outputs.declared import HIDDEN_STATES, Fields
from varlen_graphs.outputs.entries import Rows
from varlen_graphs.recipes.modes.skip_mask_checks import SkipMaskChecks
from varlen_graphs.recipes.probe import RUN_ERRORS, Trial, tolerance_of
from varlen_graphs.recipes.tower_encoder import TowerEncoder
from varlen_graphs.recipes.towers import check_loaded, check_parts
from varlen_graphs.shadows.shadow import Shadow

PATCHES, MASK = "flattened_patches", "attention_mask"
"""Arguments of these towers."""

POSITIONS = 2
"""Numbers in front of the pixels of a patch: its line and its column, from 1; both are 0 in padding."""


def flattened_patches(tower: Any, budgets: Budgets | None = None, **options: Any) -> GraphedEncoder:
    """Graph the vision tower of Pix2Struct or Kosmos 2.5, unmodified.

    The encoder is called as the tower is, with `flattened_patches` `[batch, patches, 2 + pixels]`, of which padding is
    all zeros, and an optional `attention_mask` `[batch, patches]` of 0 and 1. It returns what the tower returns,
    padding included, because the models around it read that too. A call costs one copy of a number to the host, which
    tells if each image has a patch; else the tower itself runs.

    Lines and columns come to the graphs as integers, apart from the pixels. The recipe runs a copy of the
    tower that shares its weights on two small images, and compares.

    Args:
        tower: `model.encoder` of Pix2Struct, `model.vision_model` of Kosmos 2.5.
        budgets: As for `GraphedEncoder`, padded; `None` is batches of up to 8 images with as many patches as the tower
            has positions.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: `tower` is no such tower.
    """
    check_parts(tower, ("embeddings",), "the vision tower of Pix2Struct or Kosmos 2.5")
    check_parts(tower.embeddings, ("patch_projection", "row_embedder", "column_embedder"), "its embeddings")
    check_loaded(tower)
    pixels = tower.embeddings.patch_projection.in_features
    states = {HIDDEN_STATES: Rows()} if OUTPUT_HIDDEN_STATES in inspect.signature(tower.forward).parameters else {}
    spec = BufferSpec(
        InputRows("pixels", (pixels,)),
        Lengths("patches", padded=True),
        outputs=Fields(last_hidden_state=Rows(), **states),
        inputs=[PerRow("positions", (POSITIONS,), torch.int64), PerRow("mask", (), torch.bool, pad=False)],
        declared_by="recipe",
    )
    if budgets is None:
        largest = min(len(tower.embeddings.row_embedder.weight), len(tower.embeddings.column_embedder.weight))
        budgets = DefaultBudgets(PaddedLadder(batch=8, length=largest, min_length=min(512, largest), step=2))
    _check(Shadow(tower).module, spec, pixels, tolerance_of(options))
    return PatchesEncoder(tower, budgets, spec, forward=_forward, **options)


def _forward(
    tower: Any, pixels: Tensor, positions: Tensor, mask: Tensor, output_hidden_states: bool | None = None
) -> Any:
    given = {} if output_hidden_states is None else {"output_hidden_states": output_hidden_states}
    patches = torch.cat([positions.to(pixels.dtype), pixels], dim=-1)
    mask = mask | (torch.arange(mask.shape[1], device=mask.device) == 0)  # as it is, but in synthetic calls
    with SkipMaskChecks():
        return tower(patches, attention_mask=mask.float(), **given)


class PatchesEncoder(TowerEncoder):
    """Encoder of flattened patches, called as its tower is.

    Calls that bring or ask for more than graphs give run the tower itself, and count in `stats.eager`. So do patches of
    another dtype than the tower's, because a cast would round lines and columns.
    """

    def __init__(self, tower: Any, budgets: Budgets, spec: BufferSpec, **options: Any) -> None:
        super().__init__(tower, budgets, spec, **options)
        self._names = [*inspect.signature(tower.forward).parameters]

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the images of one call.

        Returns:
            The tower's output.

        Raises:
            InputError, BudgetError, CaptureError, StaleGraphError: As for any encoder.
        """
        if self.executor.forward.is_running:  # the graphs' forward calls the tower, in whose place the encoder is
            return self.executor.forward.module_forward(*args, **kwargs)
        call = dict(zip(self._names, args, strict=False)) | kwargs
        reason = self._why_eager(call)
        if reason is not None:
            patches = call.get(PATCHES)
            return self._itself(reason, len(patches) if isinstance(patches, Tensor) else 1, args, kwargs)
        states = {name: value for name, value in call.items() if name == OUTPUT_HIDDEN_STATES and value is not None}
        return super().forward(**_split(call[PATCHES], call.get(MASK)), **states)

    def _why_eager(self, call: Mapping[str, Any]) -> str | None:
        """Return the reason why the tower itself has to answer a call; `None` if graphs may."""
        patches, mask, shape = call.get(PATCHES), call.get(MASK), self.spec.row_input.shape
        if not isinstance(patches, Tensor) or patches.dim() != 3 or (patches.shape[-1] - POSITIONS,) != shape:
            return f"{PATCHES} of another form"
        if patches.dtype != self.executor.forward.row_dtype:
            return f"{PATCHES} of another dtype"
        if not _marks_first(patches, mask):
            return f"{MASK} of another form, or an image without patches"
        graphed = {OUTPUT_HIDDEN_STATES} if declares_hidden_states(self.spec.outputs, by_module=False) else set()
        for name, value in call.items():
            if name not in {PATCHES, MASK, *graphed} and value is not None and value is not (name == "return_dict"):
                return f"argument {name!r}"
        return asked_by_config({name: call.get(name, True) for name in graphed}, self.module)


def _split(patches: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Return the arguments of graphs for patches and their mask; without one, patches of zeros are padding."""
    real = patches.sum(-1) != 0 if mask is None else mask != 0
    positions, lengths = patches[..., :POSITIONS].long(), [patches.shape[1]] * len(patches)
    return {"pixels": patches[..., POSITIONS:], "positions": positions, "mask": real, "patches": lengths}


def _marks_first(patches: Tensor, mask: Tensor | None) -> bool:
    """Return True if a mask has zeros and ones alone, and the first patch of each image is real.

    Towers add other numbers to scores, and where nothing is real they attend to all padding. Costs a copy to the host.
    """
    if mask is None:
        return bool((patches[:, 0].sum(-1) != 0).all())
    if not isinstance(mask, Tensor) or mask.shape != patches.shape[:2] or mask.device != patches.device:
        return False
    return bool(((mask == 0) | (mask == 1)).all() & (mask[:, 0] == 1).all())


def _check(tower: Any, spec: BufferSpec, pixels: int, tolerance: float | None) -> None:
    """Check that the graphs' forward gives for two small images what the tower gives.

    Raises:
        SpecError: It gives something else, or the tower does not run.
    """
    patches = torch.randn(2, 4, POSITIONS + pixels, generator=torch.Generator().manual_seed(0), device="cpu")
    patches[..., 0], patches[..., 1] = 1, torch.arange(1, 5, device="cpu")
    patches[1, 2:] = 0
    patches = patches.to(tower.embeddings.patch_projection.weight)
    try:
        with torch.no_grad():
            own = tower(patches)
        Trial(tower, spec, _forward, Budget.padded(2, 4), tolerance).check(_split(patches, None), own)
    except VarlenGraphsError:
        raise
    except RUN_ERRORS as error:
        raise SpecError(f"{type(tower).__name__} does not run on a small batch of patches: {error!r}") from error
