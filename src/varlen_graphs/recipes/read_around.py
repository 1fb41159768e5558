"""What the model around a text encoder reads of the encoder's outputs for padding, where graphs leave zeros."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from varlen_graphs.recipes.inspection import RUN_ERRORS
from varlen_graphs.recipes.text_model import IDS, MASK, TextModel
from varlen_graphs.recipes.text_padding import has_other_ids
from varlen_graphs.watch.kept_state import KeptState

LENGTH, SHORT = 11, 5
"""Tokens of a text without padding, and of padded ones."""

READS_AROUND = "padding whose outputs are read by the model around the encoder"


class ReadAround(NamedTuple):
    """What the model around a text encoder reads of the encoder's outputs for padding.

    Attributes:
        padding: True if it reads those of padding on the right: RoFormer for multiple choice takes the last place.
        other_ids: True if it reads those of padding with other ids than the one that pads: classifiers around decoders
            take the last token that has another id.
        ahead: True if it reads those of padding on the left: many classifiers take the first place.
    """

    padding: bool = False
    other_ids: bool = False
    ahead: bool = False

    @classmethod
    def of(cls, models: Sequence[nn.Module], encoder: nn.Module) -> "ReadAround":
        """Run models around an encoder on a few short texts: with its outputs for padding, and with zeros there.

        A model that does not run on token ids and a mask alone tells nothing, and is taken to read none. What the runs
        change in the models is undone.

        Raises:
            SpecError: The encoder takes no token ids.
        """
        text = TextModel(encoder)
        own = [one for one in range(text.tokens) if one not in text.special] or [text.pad]
        end = text.ends[0] if text.ends else own[-1]
        tokens = [*islice(cycle(own), LENGTH - 1), end]
        others = [one for one in dict.fromkeys([*text.special, own[0], text.tokens - 1]) if one != text.pad]

        def reads(fills: Sequence[int], ahead: bool = False) -> bool:
            return any(_reads(model, text, tokens, fills, ahead) for model in models)

        before = [KeptState(model.named_modules()) for model in models]
        try:
            with torch.no_grad():
                return cls(reads([text.pad]), reads(others), reads([text.pad, *others], ahead=True))
        finally:
            for state in before:
                state.restore()

    def matters(self, ids: Tensor, mask: Tensor | None, pad: int) -> bool:
        """Return True if a call with padding on the right may need the outputs for that. Syncs if any may."""
        if mask is None or not (self.padding or self.other_ids):
            return False
        return bool((mask == 0).any()) if self.padding else has_other_ids(ids, mask, pad)


NOTHING = ReadAround()


def _reads(model: nn.Module, text: TextModel, tokens: Sequence[int], fills: Sequence[int], ahead: bool) -> bool:
    """Return True if a model reads what its encoder makes of padding with some token ids."""
    own, more = [*tokens[-SHORT:]], LENGTH - SHORT
    padded = [[fill] * more + own if ahead else own + [fill] * more for fill in fills]
    ids = torch.tensor([[*tokens], *padded], device=text.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1:, slice(more) if ahead else slice(SHORT, None)] = False
    together = _differs(model, text.model, ids, real)
    if together is None:  # it may take single texts alone
        return any(_differs(model, text.model, *one) for one in zip(ids[:, None], real[:, None], strict=True))
    return together


def _differs(model: nn.Module, encoder: nn.Module, ids: Tensor, real: Tensor) -> bool | None:
    """Return True if the output of a model differs with zeros for padding from its encoder; `None` if it does not run.

    Models for multiple choice take texts as `[batch, choices, length]`.
    """

    def has_padding(tensor: Tensor) -> bool:
        return tensor.shape[:2] == real.shape and tensor.is_floating_point()

    def clear(module: nn.Module, args: Any, output: Any) -> Any:
        def cleared(tensor: Tensor) -> Tensor:
            outside = ~real.view(*real.shape, *[1] * (tensor.dim() - 2))
            return tensor.masked_fill(outside, 0) if has_padding(tensor) else tensor

        return tree_map_only(Tensor, cleared, output)

    def run(shape: Sequence[int]) -> list[Tensor]:
        leaves = tree_leaves(model(**{IDS: ids.view(shape), MASK: real.long().view(shape)}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [tensor[real] if has_padding(tensor) else tensor for tensor in tensors]

    for shape in (ids.shape, (1, *ids.shape)):
        try:
            expected = run(shape)
        except RUN_ERRORS:
            continue
        hook = encoder.register_forward_hook(clear)
        try:
            pairs = zip(run(shape), expected, strict=True)
            return not all(torch.allclose(one, other, equal_nan=True) for one, other in pairs)
        except RUN_ERRORS:
            return True
        finally:
            hook.remove()
    return None
