"""Encoder of texts that answers all calls that the model itself answers."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import LayoutError
from varlen_graphs.recipes.text_model import IDS, MASK, TYPES, USE_CACHE, TextModel
from varlen_graphs.spec.buffer_spec import BufferSpec

_PLAIN = (bool, int, float, str)


class TextEncoder(GraphedEncoder):
    """Encoder of texts, called as the model is, with token ids, a mask and token types.

    Calls that bring more than graphs take run the model itself, with its gradients, and count in `stats.eager`:
    embeddings in place of token ids, positions, keys and values, masks of another form or dtype, and masks whose real
    tokens do not come first.

    Attributes:
        why_padded: Reason why texts stay padded; `None` if they are packed.
    """

    def __init__(
        self, text: TextModel, budgets: Any, spec: BufferSpec, *, why_padded: str | None = None, **options: Any
    ) -> None:
        super().__init__(text.model, budgets, spec, **options)
        self.why_padded = why_padded
        parameters = inspect.signature(text.forward).parameters.values()
        self._names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._declared = {IDS, MASK, *(one.name for one in spec.inputs)}
        self._largest = text.largest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the texts of one call: see `forward`. Runs hooks on the encoder itself, if there are any."""
        if self._forward_hooks or self._forward_pre_hooks:
            return nn.Module.__call__(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the texts of one call.

        Returns:
            The model's output. Tokens past the end of each text are zeros.

        Raises:
            LayoutError: A text has more tokens than the model has positions.
            InputError, BudgetError, CaptureError, StaleGraphError: As for any encoder.
        """
        call = dict(zip(self._names, args, strict=False)) | kwargs
        if (reason := self._why_eager(call)) is None:
            try:
                return super().forward(*args, **kwargs)
            except LayoutError:
                if self._is_too_long(call):
                    raise
                reason = f"{MASK} does not mark the first tokens of each text"
        self.executor.begin()
        given = call.get(IDS)
        self.stats.count_call(len(given) if isinstance(given, Tensor) and given.dim() else 1)
        self.stats.count_eager(reason)
        return self.executor.forward.itself(*args, **kwargs)

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
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point()):
            return f"{MASK} of another form"
        return None

    def _is_too_long(self, call: dict[str, Any]) -> bool:
        """Return True if a text is longer than the table of positions: on a GPU, looking it up kills the process."""
        return self._largest is not None and call[IDS].shape[1] > self._largest
