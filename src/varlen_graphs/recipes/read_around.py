"""Find out whether a model around a text encoder reads the encoder's outputs for padding, where graphs leave zeros."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from varlen_graphs.recipes.inspection import without_new_hooks
from varlen_graphs.recipes.text_model import IDS, MASK, TextModel
from varlen_graphs.watch.kept_state import KeptState
from varlen_graphs.watch.made_up_run import MadeUpRun
from varlen_graphs.watch.thread_modes import run_under

LENGTH = 11
"""Tokens of a text without padding, if the encoder takes so many."""

SCORES_EXPANSIONS = "MultiVectorMask"
"""Part of multi-vector models of sentence-transformers: scores tokens that expand a query, outside of the mask."""

READS_AROUND = "padding whose outputs are read by the model around the encoder"


class ReadAround(NamedTuple):
    """Outputs of a text encoder for padding that a model around it reads.

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

        They run in evaluation mode and uncompiled, and what the runs change in them is undone. A model that does not
        run on token ids and a mask alone, or does not repeat its output, tells nothing, and is taken to read none. A
        sequence takes both in a dict.

        Args:
            models: The models, the outermost first.
            encoder: The encoder inside of them.

        Raises:
            SpecError: The encoder takes no token ids.
        """
        if not models:
            return cls()
        text = TextModel(encoder)
        own = [one for one in range(text.tokens) if one not in text.special] or [text.pad]
        end = text.ends[0] if text.ends else own[-1]
        tokens = [*islice(cycle(own), min(LENGTH, text.largest or LENGTH) - 1), end]
        others = [one for one in dict.fromkeys([*text.special, own[0], text.tokens - 1]) if one != text.pad]

        def reads(fills: Sequence[int], ahead: bool = False) -> bool:
            return any(_reads(model, text, tokens, fills, ahead) for model in models)

        expands = any(type(part).__name__ == SCORES_EXPANSIONS for part in models[0].modules())
        with _as_before(models[0]):
            return cls(reads([text.pad]), expands or reads(others), reads([text.pad, *others], ahead=True))

    def matters(self, ids: Tensor, mask: Tensor | None, pad: int) -> bool:
        """Return True if a call with padding on the right may need the outputs for that.

        If any call may, syncs with the device of the mask, or with that of the token ids if these count.
        """
        if mask is None or not ids.numel() or not (self.padding or self.other_ids):
            return False
        real = mask != 0 if self.padding else mask.to(ids.device) != 0
        outside = ~real if self.padding else ~real & (ids != pad)
        return bool(outside.any() & real[:, 0].all())


NOTHING = ReadAround()


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside, and undo that and what runs change."""
    before = KeptState(model.named_modules())
    trained = [part for part in model.modules() if part.training]
    try:
        with without_new_hooks(model):
            for part in trained:
                part.training = False
            yield
    finally:
        before.restore()
        for part in trained:
            part.training = True


def _reads(model: nn.Module, text: TextModel, tokens: Sequence[int], fills: Sequence[int], ahead: bool) -> bool:
    """Return True if a model reads what its encoder makes of padding with these token ids, on one side of texts."""
    short = len(tokens) // 2
    own, more = [*tokens[-short:]], len(tokens) - short
    padded = [[fill] * more + own if ahead else own + [fill] * more for fill in fills]
    ids = torch.tensor([[*tokens], *padded], device=text.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1:, slice(more) if ahead else slice(short, None)] = False
    together = _differs(model, text.model, ids, real)
    if together is None:  # it may take single texts alone
        return any(_differs(model, text.model, *one) for one in zip(ids[:, None], real[:, None], strict=True))
    return together


def _differs(model: nn.Module, encoder: nn.Module, ids: Tensor, real: Tensor) -> bool | None:
    """Return True if a model's output differs where its encoder leaves zeros for padding; `None` if it cannot be told.

    Models for multiple choice take texts as `[batch, choices, length]`.
    """

    def has_padding(tensor: Tensor) -> bool:
        return tensor.shape[:2] == real.shape and tensor.is_floating_point()

    def cleared(tensor: Tensor) -> Tensor:
        outside = ~real.view(*real.shape, *[1] * (tensor.dim() - 2))
        return tensor.masked_fill(outside, 0) if has_padding(tensor) else tensor

    own = encoder.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, cleared, own(*args, **kwargs))

    def run(shape: Sequence[int]) -> list[Tensor]:
        call = {IDS: ids.view(shape), MASK: real.long().view(shape)}
        bound = partial(model, call) if isinstance(model, nn.Sequential) else partial(model, **call)
        leaves = tree_leaves(run_under(bound, MadeUpRun()))  # uncompiled, and no index is out of range
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [tensor[real] if has_padding(tensor) else tensor for tensor in tensors]

    for shape in (ids.shape, (1, *ids.shape)):
        try:
            expected, again = run(shape), run(shape)
        except Exception:  # of the model's own code
            continue
        if not _close(expected, again):
            return None
        before = vars(encoder).get("forward")
        encoder.forward = forward  # no hook, because sentence-transformers calls it
        try:
            return not _close(expected, run(shape))
        except Exception:  # it reads zeros that it does not take
            return True
        finally:
            del encoder.forward
            if before is not None:
                encoder.forward = before
    return None


def _close(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    same = [one.shape == other.shape for one, other in zip(some, others, strict=True)]
    return all(same) and all(
        torch.allclose(one, other, equal_nan=True) for one, other in zip(some, others, strict=True)
    )
