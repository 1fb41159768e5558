"""Encoder of texts that answers all calls that the model itself answers."""

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.errors import LayoutError
from varlen_graphs.layouts.padded import shifted
from varlen_graphs.outputs.declared import HIDDEN_STATES
from varlen_graphs.recipes.padding_consumers import PaddingConsumers
from varlen_graphs.recipes.texts.text_padding import ReadPadding, has_other_ids
from varlen_graphs.recipes.texts.text_probe import IDS, MASK, ROWS, TYPES, USE_CACHE, TextProbe
from varlen_graphs.recipes.tower_encoder import TowerEncoder

_PLAIN = (bool, int, float, str)

READS_PADDING = f"{IDS} of padding, which the model reads"


class TextEncoder(TowerEncoder):
    """Encoder of texts, called as the model is, with token ids, a mask and token types.

    Calls that bring more than graphs take run the model itself, with its gradients, and count in `stats.eager`:
    embeddings in place of token ids, positions, keys and values, and masks of another form or dtype. So do texts padded
    on the left, unless the model gives them what it gives texts padded on the right.

    Attributes:
        why_padded: Reason why texts stay padded; `None` if they are packed.
        takes_left: True if graphs take texts padded on the left, too.
    """

    def __init__(
        self, model: nn.Module, text: TextProbe, budgets: Any, spec: BufferSpec, *, why_padded: str | None,
        takes_left: bool, padding: ReadPadding | None, around: PaddingConsumers, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, budgets, spec, **options)
        self.why_padded = why_padded
        self.takes_left = takes_left and not (around.ahead or around.untried)
        self._left = False  # as the last call was padded
        parameters = inspect.signature(model.forward).parameters.values()
        self._names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._declared = {IDS, *spec.describing, *(one.name for one in spec.inputs)}
        self._largest = text.largest
        self._padding = padding
        self._around = around
        self._pad = text.pad

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the texts of one call.

        Returns:
            The model's output. Tokens past the end of each text are zeros.

        Raises:
            LayoutError: A text has more tokens than the model has positions.
            InputError, BudgetError, CaptureError, StaleGraphError: As for any encoder.
        """
        if self.executor.forward.is_running:  # the graphs' forward calls the model, in whose place the encoder is
            return self.executor.forward.module_forward(*args, **kwargs)
        call = dict(zip(self._names, args, strict=False)) | kwargs
        unmasked = self.spec.layout.one_row and _is_of_ones(call.get(MASK))
        call |= {MASK: None} if unmasked else {}
        reason = self._why_eager(call)
        if reason is None and self._padding is not None and self._padding.matters(call[IDS], call.get(MASK)):
            reason = READS_PADDING
        if reason is None:
            reason = self._around.of_call(call[IDS], call.get(MASK), self._pad)
        if reason is None:
            is_too_long = self._largest is not None and call[IDS].shape[1] > self._largest
            if not (is_too_long and self.spec.layout.padded):
                left_too = self.takes_left and call.get(MASK) is not None
                both = left_too and self._around.of_texts_on_left() is None
                for left in (self._left, not self._left) if both else (False,):
                    with suppress(LayoutError):
                        if left:
                            out = self._from_left(call, args, kwargs)
                        elif unmasked:
                            out, _ = self._instead(call, len(call[IDS]), args, kwargs)
                        else:
                            out = super().forward(*args, **kwargs)
                        self._left = left
                        return out
            if is_too_long:  # on a GPU, looking such positions up ends the process
                raise LayoutError(
                    f"{IDS} is {list(call[IDS].shape)}: expected texts of up to {self._largest} tokens, for which the "
                    "model has positions; cut them, as tokenizers do with truncation=True"
                )
            reason = f"{MASK} does not mark the first tokens of each text"
        given = call.get(IDS)
        return self._itself(reason, len(given) if isinstance(given, Tensor) and given.dim() else 1, args, kwargs)

    def _from_left(self, call: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output for texts padded on the left, which move to the right and back.

        Syncs nothing more, unless the model reads such padding.
        """
        if self._padding is not None and self._padding.ahead and has_other_ids(call[IDS], call[MASK], self._pad):
            return self._itself(READS_PADDING, len(call[IDS]), args, kwargs)
        shift = call[MASK].shape[1] - call[MASK].sum(1)
        moved = {name: shifted(call[name], -shift) for name in (IDS, MASK, TYPES) if call.get(name) is not None}
        out, is_moved = self._instead(call | moved, len(call[IDS]), args, kwargs)
        if not is_moved:
            return out
        fields = {name: part for name, part in out.items() if part is not None}
        fields[ROWS] = shifted(fields[ROWS], shift)
        if HIDDEN_STATES in fields:
            fields[HIDDEN_STATES] = tuple(shifted(layer, shift) for layer in fields[HIDDEN_STATES])
        return type(out)(**fields)

    def _why_eager(self, call: dict[str, Any]) -> str | None:
        """Return the reason why the model itself has to answer a call; `None` if graphs may."""
        ids, mask = call.get(IDS), call.get(MASK)
        if ids is None:
            return f"no {IDS}"
        for name, value in call.items():
            if value is not None and name not in self._declared and not isinstance(value, _PLAIN):
                return f"argument {name!r}"
        if call.get(USE_CACHE) and USE_CACHE in self._names:
            return f"{USE_CACHE}=True"
        for tensor in (ids, call.get(TYPES)):
            if tensor is not None and (tensor.dim() != 2 or tensor.dtype != torch.int64):
                return f"{IDS} or {TYPES} of another form"
        if mask is not None and not (
            isinstance(mask, Tensor) and mask.shape == ids.shape and not mask.is_floating_point()
        ):
            return f"{MASK} of another form"
        return None


def _is_of_ones(mask: Any) -> bool:
    """Return True for a mask of ones, which hides nothing. A mask on a GPU costs a sync."""
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())
