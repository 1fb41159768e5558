"""Recipe for text encoders of transformers: their own forward, on packed tokens where their attention can."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.budgets.ladder import Budgets, DefaultBudgets, Ladder, PaddedLadder
from varlen_graphs.buffers import AttentionMask, CuSeqlens, DeviceBuffer, MaxSeqlen, RowPositions
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.errors import SpecError, VarlenGraphsError
from varlen_graphs.layouts.batch import Batch
from varlen_graphs.layouts.item_table import ItemTable
from varlen_graphs.layouts.mask import Mask
from varlen_graphs.outputs.declared import HIDDEN_STATES
from varlen_graphs.recipes.fused import fused_or
from varlen_graphs.recipes.modes.packed_positions import PackedPositions, Site
from varlen_graphs.recipes.modes.skip_mask_checks import SkipMaskChecks
from varlen_graphs.recipes.padding_consumers import NOTHING, PaddingConsumers
from varlen_graphs.recipes.probe import RUN_ERRORS, tolerance_of, why_not
from varlen_graphs.recipes.texts.bucketed_text import bucketed_forward, is_bucketed, relative_positions
from varlen_graphs.recipes.texts.fused_text import FUSED
from varlen_graphs.recipes.texts.relative_text import is_relative, relative_forward
from varlen_graphs.recipes.texts.text_encoder import TextEncoder
from varlen_graphs.recipes.texts.text_padding import ReadPadding
from varlen_graphs.recipes.texts.text_probe import (
    FARTHEST,
    IDS,
    MASK,
    MORE,
    POOLED,
    ROWS,
    TYPES,
    USE_CACHE,
    TextProbe,
    asks_for_hidden_states,
)
from varlen_graphs.recipes.towers import check_loaded, item_table
from varlen_graphs.shadows.shadow import Shadow

SPARSE = (
    "its attention is sparse for long texts and dense for short ones; call model.set_attention_type('original_full') "
    "first, which makes it dense for all"
)

REFUSED = {
    "big_bird": SPARSE,
    "bigbird_pegasus": SPARSE,
    "longformer": "its attention pads texts to whole windows, and looks for global tokens on the host",
}
"""Types of models whose small batches do not show what long ones do, and why they are refused."""

BATCHES = [1, 2, 4, 8, 16, 32, 64]
"""Budgets of batches of texts of one length."""

Forward = Callable[..., Any]
Run = Callable[..., dict[str, Any]]
"""Returns fields of an output of packed tokens, from a model, token ids, positions and segments."""
Pooler = Callable[[Any, Tensor], Tensor]
"""Computes the pooled output `[texts, dim]` of a model from the first token of each text, `[texts, dim]`."""


def packed_text(
    model: Any, budgets: Budgets | None = None, *, around: PaddingConsumers = NOTHING, **options: Any
) -> TextEncoder:
    """Graph a text encoder of transformers 5, unmodified.

    The encoder is called as the model is, with padded token ids, the mask and token types, and returns the model's own
    output class, with zeros past the end of each text. The graphs hold the model's own forward on the tokens of all
    texts one after another, with `varlen_attention`, causal and in sliding windows where the model has them: padding
    costs nothing. Layers of ModernBERT and Llama, such as those of Qwen3-Embedding, run with norms, rotation and SwiGLU
    fused. Models with other attention run on padded batches, with a mask computed in the graph; and those whose output
    depends on the padding, on texts of one length without a mask. `TextEncoder.why_padded` has the reason. See
    docs/texts.md.

    Both are checked here: the declared forward runs on a few small batches of random tokens on the device of the model,
    watched for what no graph can hold, and is compared with the model's own. The runs are those of a copy that shares
    the weights, and sync with the host.

    Args:
        model: The model, on its device, in its dtype and in evaluation mode.
        budgets: As for `GraphedEncoder`; `None` is `Ladder(32, rows_per_item=8, rows_per_segment=8)`. A model whose
            texts stay padded takes a `PaddedLadder`; it gets one with texts of up to 512 tokens in place of any other
            budgets, or batches of up to 64 texts of one length.
        around: What a model around this one, such as a classifier, reads of the outputs for padding, where graphs leave
            zeros; `wrap` finds it. Calls in which that matters run eager.
        **options: Other arguments of `GraphedEncoder`, such as `backend`, `memory`, `capture` or `verify`.

    Raises:
        SpecError: The model runs neither packed nor padded. The message has the reasons.
    """
    name = type(model).__name__
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in REFUSED and getattr(model, "attention_type", None) != "original_full":
        raise SpecError(f"{name} cannot be graphed: {REFUSED[kind]}")
    check_loaded(model)
    text = TextProbe(Shadow(model).module)
    text.tolerance = tolerance_of(options)
    if model.training:
        raise SpecError(f"{name} is in training mode, in which it does not repeat its outputs: call model.eval() first")
    parts = [*text.tower.modules()]
    try:
        calls = text.calls()
        expected = [text.run(call) for call in calls]
        if [*map(id, text.tower.modules())] != [*map(id, parts)]:
            raise SpecError(f"{name} cannot be graphed: it replaces parts of itself as it runs")
        compiles = getattr(options.get("capture"), "compile", False)
        spec, forward, why_padded = _declare(text, calls, expected, _why_not_packed(text, compiles))
        options = {"eager_if": _returns_cache} | options if text.caches() else options
        takes_left = text.ignores_side(calls, expected)
        padding = None if spec.layout.one_row else ReadPadding.of(text)
    except VarlenGraphsError:
        raise
    except RUN_ERRORS as error:
        raise SpecError(f"{name} does not run on a small batch of token ids: {error!r}") from error
    if why_padded is None:
        budgets = DefaultBudgets(Ladder(32, rows_per_item=8, rows_per_segment=8)) if budgets is None else budgets
    elif spec.layout.one_row:
        budgets = DefaultBudgets(BATCHES)
    elif not isinstance(budgets, PaddedLadder):
        longest = min(512, text.largest or 512)
        budgets = DefaultBudgets(PaddedLadder(length=longest, min_length=min(32, longest)))
    options |= {"why_padded": why_padded, "takes_left": takes_left, "padding": padding, "around": around}
    return TextEncoder(model, text, budgets, spec, forward=forward, **options)


def _why_not_packed(text: TextProbe, compiles: bool) -> str | None:
    """Return why packing the texts of a model is not even tried, or `None`."""
    if text.reach > FARTHEST:
        return (
            f"its configuration says {text.reach}: packed texts are not checked for a reach of over {FARTHEST} tokens"
        )
    if compiles and torch.__version__ < "2.13" and "position_ids" not in text.takes and not is_relative(text.tower):
        return (
            f"it counts its tokens itself, which compiled code of torch {torch.__version__} hides; expected torch 2.13"
        )
    return None


def _declare(
    text: TextProbe, calls: list[dict[str, Tensor]], expected: list[Any], why_not_packed: str | None
) -> tuple[BufferSpec, Forward, str | None]:
    """Return the first declaration that passes the check, its forward, and the reason if texts stay padded."""
    failures = {"packed": {why_not_packed: None}} if why_not_packed else {}
    for spec, forward in _attempts(text, expected[0], packs=why_not_packed is None):
        if spec.layout.one_row:
            calls = [{IDS: call[IDS]} for call in calls if MASK not in call]
            expected = [text.run(call) for call in calls]
        reason = None
        if not spec.packs:
            more = 0 if spec.layout.one_row else MORE
            reason = why_not(partial(text.check_ignores_mask, calls, expected, more))
        reason = reason or why_not(partial(text.check, spec, forward, calls, expected))
        if reason is None:
            why_padded = None if spec.packs else next(iter(failures["packed"]))
            return _with_hidden_states(text, spec, forward, calls, expected), forward, why_padded
        failures.setdefault(_how(spec), {})[reason] = None
    tried = [f"{how}: {why}" for how, whys in failures.items() for why in whys]
    raise SpecError(
        f"{type(text.tower).__name__} cannot be graphed as a text encoder; to declare it yourself, see docs/texts.md. "
        "What was tried:\n- " + "\n- ".join(tried)
    )


def _attempts(text: TextProbe, output: Any, packs: bool) -> Iterator[tuple[BufferSpec, Forward]]:
    outputs = text.outputs(output, hidden_states=False)
    declared = partial(BufferSpec, text.rows, outputs=outputs, inputs=text.inputs, declared_by="recipe")
    buffers = [RowPositions("row_in_text", text.largest), CuSeqlens(per="item"), MaxSeqlen(per="item"), item_table()]
    own: Run = relative_forward if is_relative(text.tower) else _own(text)
    fused = fused_or(text.tower, own, FUSED)
    runs = [own] if fused is None else [fused, own]
    poolers = POOLERS if POOLED in outputs.fields else (None,)
    for run, pooler in product(runs, poolers) if packs else ():
        yield declared(Mask(MASK, optional=True, packed=True), buffers), _packed(text, run, type(output), pooler)
    padded = Mask(MASK, optional=True)
    for dtype, causal in product((torch.bool, None), (False, True)):  # eager attention of some adds a floating mask
        yield declared(padded, [AttentionMask("mask", causal=causal, dtype=dtype)]), _padded(text)
    yield declared(padded), _padded(text)
    if is_bucketed(text.tower):
        positions = relative_positions(text.tower, text.device)
        yield declared(padded, [DeviceBuffer("relative_pos", positions, any_segments=False)]), bucketed_forward
    yield BufferSpec(replace(text.rows, shape=None), Batch(), outputs=outputs, declared_by="recipe"), _padded(text)


def _how(spec: BufferSpec) -> str:
    """Return how a declaration takes texts, for messages."""
    return "packed" if spec.packs else "padded" if spec.layout.padded else "of one length"


def _with_hidden_states(
    text: TextProbe, spec: BufferSpec, forward: Forward, calls: list[dict[str, Tensor]], expected: list[Any]
) -> BufferSpec:
    """Return the declaration with the hidden states of all layers, if the forward returns them as the model does."""
    call = asks_for_hidden_states(calls[0])
    more = replace(spec, outputs=text.outputs(expected[0], hidden_states=True))
    return spec if why_not(lambda: text.check(more, forward, [call], [text.run(call)])) else more


def _packed(text: TextProbe, run: Run, output: type, pooler: Pooler | None) -> Forward:
    """Return the forward of a model on packed tokens."""
    before, largest, caches = text.before, text.largest, USE_CACHE in text.takes

    def forward(
        model: Any, input_ids: Tensor, row_in_text: Tensor, cu_seqlens: Tensor, max_seqlen: int, table: ItemTable,
        token_type_ids: Tensor | None = None, output_hidden_states: bool | None = None,
    ) -> Any:  # fmt: skip
        positions = _positions(input_ids, row_in_text, before, largest)
        given = _given(caches, token_type_ids, output_hidden_states)
        fields = run(model, input_ids, positions, cu_seqlens, max_seqlen, **given)
        if pooler is not None:
            fields[POOLED] = pooler(model, fields[ROWS][table.item_starts.clamp(max=len(input_ids) - 1)])
        return output(**fields)

    return forward


def _own(text: TextProbe) -> Run:
    """Return the forward of the model itself, with `varlen_attention` in place of its attention."""
    takes_positions, user = "position_ids" in text.takes, text.rows
    others: set[Site] = set()

    def run(
        model: Any, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int, **given: Any
    ) -> dict[str, Any]:
        from varlen_graphs.attention.transformers import sharing_schedules, use_attention

        counting = nullcontext() if takes_positions else PackedPositions(positions, others)
        given |= {"position_ids": positions} if takes_positions else {}
        given = {name: part[None] if isinstance(part, Tensor) else part for name, part in given.items()}
        given |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        attention = use_attention(model, user=user)  # the user lives as long as the encoder
        with attention, sharing_schedules(), SkipMaskChecks(), counting:
            out = model.forward(ids[None], max_length_q=max_seqlen, max_length_k=max_seqlen, **given)
        layers = out.get(HIDDEN_STATES) or ()
        states = {HIDDEN_STATES: tuple(layer[0] for layer in layers)} if layers else {}
        return {ROWS: out[ROWS][0]} | states

    return run


def _padded(text: TextProbe) -> Forward:
    """Return the forward of a model on a batch, with `mask` of four dimensions, that of the call, or none."""
    caches = USE_CACHE in text.takes

    def forward(
        model: Any, input_ids: Tensor, mask: Tensor | None = None, attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None, output_hidden_states: bool | None = None,
    ) -> Any:  # fmt: skip
        given = _given(caches, token_type_ids, output_hidden_states)
        with SkipMaskChecks():
            return model.forward(input_ids, attention_mask=attention_mask if mask is None else mask, **given)

    return forward


def _given(caches: bool, types: Tensor | None, hidden_states: bool | None) -> dict[str, Any]:
    """Return the arguments that calls of a model have in common, which may take `USE_CACHE`."""
    given: dict[str, Any] = {USE_CACHE: False} if caches else {}
    given |= {} if types is None else {TYPES: types}
    return given if hidden_states is None else given | {"output_hidden_states": hidden_states}


def _positions(ids: Tensor, row_in_text: Tensor, before: int | None, largest: int | None) -> Tensor:
    """Return the positions that a model gives tokens by itself, int64 `[rows]`.

    From 0 in each text; or, where the table has an entry for padding, after that entry, which all padding tokens have.
    """
    if before is None or largest is None:
        return row_in_text
    counted = ids != before
    count = counted.cumsum(0)
    first = torch.arange(len(ids), device=ids.device) - row_in_text
    ahead = (count - counted.long())[first]
    return ((count - ahead) * counted + before).clamp(max=before + largest)


def _pool(model: Any, first: Tensor) -> Tensor:
    pooled: Tensor = model.pooler(first[:, None])
    return pooled


def _pool_and_activate(model: Any, first: Tensor) -> Tensor:
    pooled: Tensor = model.pooler_activation(model.pooler(first))
    return pooled


POOLERS: tuple[Pooler, ...] = (_pool, _pool_and_activate)
"""Ways of models to pool: by a module that takes a batch (BERT), or by one of vectors and an activation (ALBERT)."""


def _returns_cache(model: nn.Module) -> str | None:
    """Return why calls must run eager: the model is set to return its keys and values, which graphs do not."""
    wanted = getattr(model.config, USE_CACHE, False)
    return "config.use_cache=True; set it to False to encode texts" if wanted else None
