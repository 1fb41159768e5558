"""Token ids of padding that a text encoder reads, though the mask hides them: graphs put others in their place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varlen_graphs.recipes.texts.text_probe import IDS, MASK, TextProbe, parts_of


class ReadPadding(NamedTuple):
    """Dependence of the output of a text on the token ids of its padding.

    Attributes:
        always: True if it does for any text: MobileBERT reads the next token, and ESM counts mask tokens.
        in_search: True if it does for a text without the token that the model looks for: CLIP pools at the token that
            ends a text, or at the largest id.
        ahead: True if it does for padding on the left: models may count positions from the last id that pads.
        pad: Token id that graphs put in all padding, of which they have more than a call.
        ends: Token ids that end texts.
    """

    always: bool
    in_search: bool
    ahead: bool
    pad: int
    ends: Sequence[int]

    @classmethod
    def of(cls, text: TextProbe) -> "ReadPadding":
        """Try the special token ids and those at both ends of the vocabulary, behind texts with and without an end."""
        some = next((one for one in range(text.tokens) if one not in text.special), 0)
        complete = [some, text.tokens - 1, *(text.ends[:1] or [some])]
        always = _changes(text, complete, some)
        in_search = always or _changes(text, [some] * len(complete), some)
        return cls(always, in_search, _changes(text, complete, some, ahead=True), text.pad, text.ends)

    def matters(self, ids: Tensor, mask: Tensor | None) -> bool:
        """Return True if a call may need its own padding, or none. Syncs, unless no padding is read at all."""
        if not self.in_search or not ids.numel():
            return False
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device).bool()
        if self.always:
            return has_other_ids(ids, real, self.pad)
        padding = ids.masked_fill(real, self.pad)
        found = padding.amax(1) > ids.masked_fill(~real, -1).amax(1)
        for end in self.ends:
            found |= (padding == end).any(1) & ~((ids == end) & real).any(1)
        return bool(found.any())


def has_other_ids(ids: Tensor, mask: Tensor, pad: int) -> bool:
    """Return True if padding holds other ids than the one that pads. Syncs."""
    return bool(((ids != pad) & (mask.to(ids.device) == 0)).any())


def _changes(text: TextProbe, tokens: list[int], some: int, ahead: bool = False) -> bool:
    """Return True if the output of a text changes with the token id of padding behind it, or ahead of it."""
    fills = text.special_texts().flatten().tolist()
    fills = [*dict.fromkeys([some, text.tokens - 1, *text.special, *fills])]
    texts = [[fill, *tokens] if ahead else [*tokens, fill] for fill in fills]
    ids = torch.tensor(texts, device=text.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[:, 0 if ahead else -1] = False
    outputs = (text.run({IDS: one, MASK: real.long()}) for one in (ids, ids.masked_fill(~real, text.pad)))
    own, padded = (parts_of(output, real) for output in outputs)
    return not all(torch.allclose(tensor, padded[name], equal_nan=True) for name, tensor in own.items())
