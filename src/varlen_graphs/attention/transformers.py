"""`varlen_attention` inside unmodified transformers models."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from varlen_graphs.attention.api import TileSchedule, tile_schedule, varlen_attention
from varlen_graphs.errors import InputError

ATTENTION = "varlen_graphs_flash"
"""Name registered with transformers. Transformers 5 passes `cu_seqlens` to any attention with "flash" in its name."""

_EXACT_NAME = "flash_attention_2"
"""Name of the only attention that transformers 4.57 passes `cu_seqlens` to."""


def flash_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute `varlen_attention` with the signature of transformers' attention functions.

    Takes heads `[1, heads, rows, head_dim]`, and returns `[1, rows, heads, head_dim]` and `None` for the attention
    weights. Attention is causal if `is_causal`, or else the attribute of `module` of this name, is true. With
    `sliding_window`, a query sees `sliding_window - 1` keys before its own, and as many after it unless attention is
    causal. Options that would change the result raise: soft caps, sinks, dropout, biases by position, and keys of other
    lengths than the queries.

    Raises:
        InputError: The batch is padded, there is a mask, or an option would change the result.
    """
    unsupported = [name for name in ("softcap", "s_aux", "dropout", "position_bias") if _given(kwargs, name)]
    if kwargs.get("cu_seq_lens_k", cu_seq_lens_q) is not cu_seq_lens_q:
        unsupported.append("cu_seq_lens_k")
    if query.shape[0] != 1 or cu_seq_lens_q is None or attention_mask is not None or unsupported:
        raise InputError(
            f"{ATTENTION} got query {list(query.shape)}, {'no' if cu_seq_lens_q is None else 'a'} cu_seq_lens_q, "
            f"{'no' if attention_mask is None else 'an'} attention_mask and {unsupported or 'no'} unsupported options: "
            "expected packed rows [1, heads, rows, head_dim] with cu_seq_lens_q, no mask and no such option; use it "
            "for encoders that pack their items"
        )
    q, k, v = (rearrange(x, "1 heads rows dim -> rows heads dim") for x in (query, key, value))
    # Transformers 4.57 passes a tensor: the number of rows is an upper bound that needs no host sync.
    longest = max_length_q if isinstance(max_length_q, int) else q.shape[0]
    window = (sliding_window - 1,) * 2 if sliding_window else (-1, -1)
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    schedule = _shared_schedule(cu_seq_lens_q, longest, *q.shape)
    out = varlen_attention(
        q, k, v, cu_seq_lens_q, longest, scale=scaling, causal=causal, window=window, schedule=schedule
    )
    return out[None], None


def _given(kwargs: dict[str, Any], name: str) -> bool:
    value = kwargs.get(name)
    return value is not None and (isinstance(value, Tensor) or bool(value))


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, flash_attention)

_USING: ContextVar[tuple[int, ...]] = ContextVar("_USING", default=())
"""Ids of the configs whose attention is `varlen_attention` in this thread."""

_SCHEDULES: ContextVar[dict[tuple[int, ...], TileSchedule] | None] = ContextVar("_SCHEDULES", default=None)
"""Schedules that layers share in this thread; see `sharing_schedules`."""

_LOCK = threading.RLock()  # the garbage collector may end a user in a thread that holds it
_JOINED: set[tuple[int, int]] = set()
"""Ids of users, and of the properties that stay for them."""


@contextmanager
def use_attention(module: Any, user: Any = None) -> Iterator[None]:
    """Run an unmodified transformers model with `varlen_attention` inside a `with` block, in this thread only.

    Nothing of the model changes: in this thread, its config names `varlen_attention` as its attention. Transformers
    4.57 knows only one name, that of FlashAttention 2, whose function then is `varlen_attention` in this thread.

    For this, the class of the config gets a property that asks the thread, which stays for the next block, as long as
    `user` lives. After the last user the class is as before, unless others have changed the property since.

    Args:
        module: A tower, or a model all of whose parts pack their items: attention raises `InputError` in other parts.
        user: An object that lives as long as blocks may follow; by default the config.
    """
    parts = _with_parts(module.config)
    for kind in {type(part) for part in parts}:
        _ask_thread(kind, module.config if user is None else user)
    if not _any_flash_name() and not isinstance(ALL_ATTENTION_FUNCTIONS[_EXACT_NAME], _ByThread):
        ALL_ATTENTION_FUNCTIONS[_EXACT_NAME] = _ByThread(ALL_ATTENTION_FUNCTIONS[_EXACT_NAME])
    token = _USING.set((*_USING.get(), *map(id, parts)))
    try:
        yield
    finally:
        _USING.reset(token)


@contextmanager
def sharing_schedules() -> Iterator[None]:
    """Let layers with the same segments and heads share a tile schedule, inside a `with` block of one forward."""
    token = _SCHEDULES.set({})
    try:
        yield
    finally:
        _SCHEDULES.reset(token)


def _shared_schedule(cu_seqlens: Tensor, longest: int, rows: int, heads: int, head_dim: int) -> TileSchedule | None:
    """Return the schedule that layers share inside `sharing_schedules`; elsewhere each layer computes its own."""
    known = None if torch.compiler.is_compiling() else _SCHEDULES.get()
    if known is None:
        return None
    key = id(cu_seqlens), longest, rows, heads, head_dim  # the schedule keeps the tensor, and so its id
    if key not in known:
        known[key] = tile_schedule(cu_seqlens, longest, rows=rows, heads=heads, head_dim=head_dim)
    return known[key]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _using() -> tuple[int, ...]:
    return _USING.get()


class _AsksThread(property):
    """Property of a config class that names the attention that the thread uses.

    Attributes:
        kind: The class.
        own: The property that it replaces; `None` if the class inherited it.
        users: Number of objects that it stays for.
    """

    kind: Any
    own: property | None
    users: int


def _ask_thread(kind: Any, user: Any) -> None:
    """Let configs of a class name the attention that the thread uses, while a user lives.

    Through the property of the class, because nothing of a config may change while other threads run its model.
    Without effect on other threads.
    """
    found = kind._attn_implementation
    if isinstance(found, _AsksThread) and (id(user), id(found)) in _JOINED:  # nearly always
        return
    with _LOCK:
        found = kind._attn_implementation
        asks = found if isinstance(found, _AsksThread) else _asking(kind, found)
        asks.users += 1
        _JOINED.add((id(user), id(asks)))
        weakref.finalize(user, _leave, id(user), asks).atexit = False
        if asks is not found:
            kind._attn_implementation = asks


def _asking(kind: Any, found: property) -> _AsksThread:
    name = ATTENTION if _any_flash_name() else _EXACT_NAME
    get: Callable[[Any], Any] = found.fget  # type: ignore[assignment]

    def attention(config: Any) -> Any:
        return name if (using := _using()) and id(config) in using else get(config)

    asks = _AsksThread(attention, found.fset)
    asks.kind, asks.own, asks.users = kind, vars(kind).get("_attn_implementation"), 0
    return asks


def _leave(user: int, asks: _AsksThread) -> None:
    """Restore the property of a class after its last user."""
    with _LOCK:
        _JOINED.discard((user, id(asks)))
        asks.users -= 1
        if asks.users or vars(asks.kind).get("_attn_implementation") is not asks:
            return
        if asks.own is None:
            del asks.kind._attn_implementation
        else:
            asks.kind._attn_implementation = asks.own


class _ByThread:
    """Attention function that is `varlen_attention` where the thread uses it, and another one elsewhere."""

    def __init__(self, other: Callable[..., Any]) -> None:
        self._other = other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (flash_attention if _using() else self._other)(*args, **kwargs)


def _with_parts(config: Any) -> list[Any]:
    """Return a config and all configs inside it."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for one in inner if one is not None for part in _with_parts(one))]


def _any_flash_name() -> bool:
    """Return True if transformers accepts any name that contains "flash", False if only one exact name (4.57)."""
    import transformers.utils.generic as generic

    return hasattr(generic, "is_flash_attention_requested")
