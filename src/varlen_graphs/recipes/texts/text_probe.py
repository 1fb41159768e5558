"""A text encoder of transformers, and small batches of texts to check a declaration of it with."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.declaration.other_outputs import OUTPUT_HIDDEN_STATES
from varlen_graphs.errors import SpecError, counted
from varlen_graphs.inputs.extra import PerRow
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.padded import real_rows, shifted
from varlen_graphs.outputs.declared import HIDDEN_STATES, Fields
from varlen_graphs.outputs.entries import Items, Rows
from varlen_graphs.recipes.probe import RUN_ERRORS, TowerProbe
from varlen_graphs.recipes.rounding import difference

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
"""Arguments of text encoders."""

ROWS, POOLED = "last_hidden_state", "pooler_output"
"""Fields of their outputs."""

MORE = 3
"""Tokens of padding that must not change an output."""

REACHES = re.compile(r"(?!.*(layers|feed_forward|rope|theta|freq)).*(window|chunk|local|topk|block)")
"""Names of settings that say how far attention reaches."""

FARTHEST = 8192
"""Longest reach that texts are made for to check it."""

SOME_IDS, SOME_LENGTH = 256, 64
"""Number of token ids at each end of the vocabulary, where special ones are, and length of texts made of them."""

USE_CACHE = "use_cache"
"""The argument, and the setting of the configuration, by which decoders return their keys and values."""


class TextProbe(TowerProbe):
    """A text encoder to run, and what its parts tell.

    Args:
        tower: The model.

    Attributes:
        pad: Token id of padding.
        special: Token ids that the configuration names, that of padding first.
        reach: Number of tokens that attention reaches over, the largest that the configuration names; 0 for none.
        ends: Token id that ends a text, if the configuration names it.
        largest: Most tokens of a text, as a learned table of positions has entries; `None` for no limit.
        before: Entry of the table for padding, after which positions begin; `None` if there is none.
        tokens: Number of token ids.
        config: Configuration of the model.

    Raises:
        SpecError: The model takes no token ids, or has no embedding of them.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__(tower)
        name, takes = type(tower).__name__, [*self.takes]
        words = None
        with suppress(NotImplementedError):  # transformers 5 knows no embedding of some models
            words = getattr(tower, "get_input_embeddings", lambda: None)()
        if IDS not in takes or MASK not in takes or not isinstance(words, nn.Embedding):
            raise SpecError(
                f"{name} takes {takes}: expected a text encoder of transformers, with an nn.Embedding of tokens "
                f"and the arguments {IDS!r} and {MASK!r}"
            )
        self.config: Any = getattr(tower, "config", None)
        self.tokens = words.num_embeddings
        pad = getattr(self.config, "pad_token_id", None)
        self.pad = pad if isinstance(pad, int) and 0 <= pad < self.tokens else 0
        most = getattr(self.config, "max_position_embeddings", None)
        tables = [one for one in tower.modules() if isinstance(one, nn.Embedding) and one is not words]
        named = vars(self.config).items() if self.config is not None else ()
        own = [(name, one) for name, value in named if name.endswith("_token_id") for one in _numbers(value)]
        self.special = [self.pad, *(one for _, one in own if 0 <= one < self.tokens)]
        self.ends = [one for name, one in own if name == "eos_token_id" and 0 <= one < self.tokens]
        self.reach = max((one for name, value in named if REACHES.match(name) for one in _numbers(value)), default=0)
        positions = next((table for table in tables if table.num_embeddings - _unused(table) == most), None)
        self.largest: int | None = None
        self.before = None if positions is None else positions.padding_idx
        if positions is not None:
            entries = positions.num_embeddings - _unused(positions)
            self.largest = entries - (0 if self.before is None else self.before + 1)

    @property
    def rows(self) -> InputRows:
        """Declaration of the token ids."""
        return InputRows(IDS, shape=(), dtype=torch.int64, pad=self.pad)

    @property
    def inputs(self) -> list[PerRow]:
        """Declarations of tensors beside them."""
        return [PerRow(TYPES, dtype=torch.int64, default=0)] if self.takes_types else []

    @cached_property
    def takes_types(self) -> bool:
        """True if calls may bring token types, which tokenizers make for models that ignore them, too."""
        if TYPES in self.takes:
            return True
        ids = torch.full((1, 2), self.pad, device=self.device)
        try:
            self.run({IDS: ids, TYPES: torch.zeros_like(ids)})
        except RUN_ERRORS:
            return False
        return True

    def calls(self) -> list[dict[str, Tensor]]:
        """Return calls with small batches of texts: long ones, mixed lengths, one text, no mask, and special tokens.

        The first has more tokens in all than a table of positions, and a text with more than attention reaches over.
        """
        longest = min(max(32, min(self.reach, FARTHEST)) + 8, self.largest or math.inf)
        many = [int(longest), 5] + [1 + (self.largest or 0) // 2] * 2 * (self.largest is not None)
        some = [many, [7, 1, 12], [9], [10, 10], [3, 16]]
        calls = []
        for at, lengths in enumerate(some):
            lengths = [min(length, self.largest or length) for length in lengths]
            generator = torch.Generator().manual_seed(at)
            real = real_rows(torch.tensor(lengths, device="cpu"), max(lengths))
            ids = torch.randint(self.tokens, real.shape, generator=generator, device="cpu")
            special = torch.tensor(self.special[: lengths[0]], device="cpu")  # models may count or search them
            ids[0, : len(special)] = special
            if self.ends:
                ids[torch.arange(len(lengths), device="cpu"), torch.tensor(lengths, device="cpu") - 1] = self.ends[0]
            call = {IDS: ids.masked_fill(~real, self.pad)}
            if not real.all():
                call[MASK] = real.long()
            if self.inputs and at:
                kinds = max(1, getattr(self.config, "type_vocab_size", 1))
                call[TYPES] = torch.randint(kinds, real.shape, generator=generator, device="cpu") * real
            calls.append(call)
        calls.append({IDS: self.special_texts()})
        return [{name: tensor.to(self.device) for name, tensor in call.items()} for call in calls]

    def special_texts(self) -> Tensor:
        """Return texts of the token ids at both ends of the vocabulary, in which a model may look for some of them."""
        ids = torch.arange(self.tokens, device="cpu")
        ids = ids[(ids < SOME_IDS) | (ids >= self.tokens - SOME_IDS)]
        ids = ids[~torch.isin(ids, torch.tensor([self.pad, *self.ends], device="cpu"))]
        length = min(SOME_LENGTH, len(ids), self.largest or math.inf)
        texts = ids[: len(ids) // length * length].view(-1, int(length))
        if self.ends:
            texts[:, -1] = self.ends[0]
        return texts

    def run(self, call: Mapping[str, Any]) -> Any:
        """Return the model's own output of a call, without hidden states where it asks for none."""
        return super().run({**self.plain, **call})

    def outputs(self, output: Any, hidden_states: bool) -> Fields:
        """Declare an output: an entry a token, and an entry a text."""
        if not isinstance(output, Mapping) or not isinstance(output.get(ROWS), Tensor):
            raise SpecError(
                f"{type(self.tower).__name__} returns a {type(output).__name__}: expected an output with the field "
                f"{ROWS!r}; graph the encoder inside of it"
            )
        kept = {name for name, part in output.items() if _is_cache(name, part)}
        fields = {name for name, part in output.items() if part is not None} - {*kept, HIDDEN_STATES}
        if unknown := sorted(fields - {ROWS, POOLED}):
            raise SpecError(f"{type(self.tower).__name__} returns {unknown}: expected {ROWS!r} and {POOLED!r} alone")
        declared = {ROWS: Rows()} | ({POOLED: Items()} if POOLED in fields else {})
        return Fields(**declared, **({HIDDEN_STATES: Rows()} if hidden_states else {}))

    def ignores_side(self, calls: Sequence[Mapping[str, Tensor]], expected: Sequence[Any]) -> bool:
        """Return True if the model gives texts that are padded on the left what it gives them padded on the right."""
        for call, output in zip(calls, expected, strict=True):
            if MASK in call:
                shift = call[MASK].shape[1] - call[MASK].sum(1)
                try:
                    left = self.run({name: shifted(tensor, shift) for name, tensor in call.items()})
                    parts = parts_of(left, shifted(call[MASK], shift).bool())
                    for name, tensor in parts_of(output, call[MASK].bool()).items():
                        self._compare(name, parts.get(name), tensor, call[MASK].sum(1).tolist())
                except (SpecError, *RUN_ERRORS):
                    return False
        return True

    def check_ignores_mask(self, calls: Sequence[Mapping[str, Tensor]], expected: Sequence[Any], more: int) -> None:
        """Check that the model gives texts with a mask, and so many tokens of padding, what it gives them without.

        Raises:
            SpecError: It gives something else.
        """
        for call, output in zip(calls, expected, strict=True):
            length = call[IDS].shape[1]
            if MASK not in call and length + more <= (self.largest or math.inf):
                fill = {IDS: self.pad}
                wider = {
                    name: functional.pad(tensor, (0, more), value=fill.get(name, 0)) for name, tensor in call.items()
                }
                real = real_rows(torch.full((len(call[IDS]),), length, device=self.device), length + more)
                got, own = self.run({**wider, MASK: real.long()}), torch.ones_like(call[IDS]).bool()
                parts = parts_of(got, real)
                beside = f"beside {counted(more, 'token')} of padding" if more else "with a mask of ones"
                for name, tensor in parts_of(output, own).items():
                    self._compare(f"{name} {beside}", parts.get(name), tensor, own.sum(1).tolist())

    def caches(self) -> bool:
        """Return True if the model returns keys and values where it is asked for them."""
        if USE_CACHE not in self.takes:
            return False
        try:
            output = self.run({IDS: torch.full((1, 2), self.pad, device=self.device), USE_CACHE: True})
        except RUN_ERRORS:  # stacks of T5 return them only as decoders
            return False
        return isinstance(output, Mapping) and any(_is_cache(name, part) for name, part in output.items())

    def check(
        self, spec: BufferSpec, forward: Callable[..., Any], calls: Sequence[Mapping[str, Any]], expected: Sequence[Any]
    ) -> None:
        """Check that the declared forward gives what the model itself gives for these calls, see `Trial.check`."""
        trial = self.trial(spec, forward, Budget.padded(8, 64))
        for call, output in zip(calls, expected, strict=True):
            trial.check({**self.plain, **call}, output)

    def _compare(self, name: str, got: Tensor | None, expected: Tensor, lengths: list[int]) -> None:
        if got is None or got.shape != expected.shape:
            came = None if got is None else list(got.shape)
            raise SpecError(f"its {name} is {came} for texts of {lengths} tokens: expected {list(expected.shape)}")
        if (error := difference(got, expected)) is not None:
            raise SpecError(f"its {name} differs for texts of {lengths} tokens (relative L2 {error:.1e})")


def _unused(table: nn.Embedding) -> int:
    """Return the number of entries of a table ahead of the first position, as tables like those of BART have."""
    return int(getattr(table, "offset", 0))


def _numbers(value: Any) -> Iterator[int]:
    """Yield the integers of a setting: itself, or those of a list."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if type(one) is int:
            yield one


def parts_of(output: Any, mask: Tensor) -> dict[str, Tensor]:
    """Return the tensors of an output by name, those with an entry a token without padding."""
    parts = {ROWS: output[ROWS][mask]}
    if output.get(POOLED) is not None:
        parts[POOLED] = output[POOLED]
    layers = output.get(HIDDEN_STATES) or ()
    return parts | {f"{HIDDEN_STATES}[{at}]": layer[mask] for at, layer in enumerate(layers)}


def asks_for_hidden_states(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call that asks for the hidden states of all layers, too."""
    return {**call, OUTPUT_HIDDEN_STATES: True}


def _is_cache(name: str, part: Any) -> bool:
    """Return True for the keys and values in an output, in any version: a `Cache`, or tuples by the old name."""
    return part is not None and (name == "past_key_values" or "Cache" in {cls.__name__ for cls in type(part).__mro__})
