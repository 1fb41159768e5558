"""Padded forward of DeBERTa v2 and v3, whose own copies a host tensor to number relative positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.layouts.item_table import ItemTable


def is_bucketed(model: Any) -> bool:
    """Return True if an encoder numbers relative positions, and takes the numbers as an argument."""
    return hasattr(getattr(model, "encoder", None), "get_rel_pos")


def relative_positions(model: Any, device: torch.device) -> Callable[[ItemTable], Tensor]:
    """Return a function of the numbers of relative positions of a padded batch, int64 `[1, length, length]`.

    The model numbers all positions here, up to those from which on its attention clamps the numbers.
    """
    reach = model.encoder.max_relative_positions
    numbers = model.encoder.get_rel_pos(torch.empty((1, reach + 1, 1), device=device))[0]
    numbers = torch.cat([numbers[0].flip(0), numbers[1:, 0]])  # queries minus keys, from -reach to reach

    def positions(table: ItemTable) -> Tensor:
        row = torch.arange(table.budget.max_seqlen, device=table.device)
        return numbers[(row[:, None] - row).clamp(-reach, reach) + reach][None]

    return positions


def bucketed_forward(
    model: Any, input_ids: Tensor, attention_mask: Tensor, relative_pos: Tensor, token_type_ids: Tensor | None = None,
    output_hidden_states: bool | None = None,
) -> Any:  # fmt: skip
    """Run the submodules of a model on a padded batch, with a mask `[batch, length]` and numbers of positions."""
    x = model.embeddings(input_ids=input_ids, token_type_ids=token_type_ids, mask=attention_mask)
    return model.encoder(x, attention_mask, relative_pos=relative_pos, output_hidden_states=bool(output_hidden_states))
