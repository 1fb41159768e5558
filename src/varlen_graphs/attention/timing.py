"""Timing of attention backends, once per size of inputs, and choices that other sizes repeat, for captures."""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varlen_graphs.attention.inputs import AttentionInputs
from varlen_graphs.files import number

CYCLES_PER_S = 2e9
"""Of a GPU, at most."""

LONGEST_WAIT_S = 0.05
"""Most seconds of launches that the device is made to wait for: others may be using it."""

UNHIDDEN = 0.05
"""Share of the device's time below which launches need not be hidden behind a wait."""

RunAttention = Callable[[AttentionInputs], Tensor]


class NotRepeatedError(Exception):
    """A run calls attention in another way than the one whose choices it was to repeat."""


@dataclass
class AttentionCost:
    """Attention cost of one run of a module."""

    per_square: float = 0.0  # milliseconds per squared row of a segment, summed over all attention calls
    choices: list[str] = field(default_factory=list)  # the backend of each call that may have any, in order


class Timed(NamedTuple):
    """Result of timing the backends on one size of inputs."""

    fastest: str
    per_square: float


_MEASURING: ContextVar[AttentionCost | None] = ContextVar("_MEASURING", default=None)
"""Measurement in progress in this thread; other threads may run attention meanwhile."""

_REPEATING: ContextVar[Iterator[str] | None] = ContextVar("_REPEATING", default=None)
"""Choices to come in this thread."""

results: dict[tuple[object, ...], Timed] = {}
"""Results by device, dtype and size of the inputs, and by the backends that support them."""


@contextmanager
def measuring() -> Iterator[AttentionCost]:
    """Time the backends that support each attention call inside the block, once per size, and keep the fastest.

    Syncs with the device. Outside the block `fastest` returns the stored result, or the first backend if there is none.
    """
    token = _MEASURING.set(now := AttentionCost())
    try:
        yield now
    finally:
        _MEASURING.reset(token)


def is_measuring() -> bool:
    """Return True inside `measuring`, in this thread."""
    return _MEASURING.get() is not None


@contextmanager
def repeating(choices: Sequence[str]) -> Iterator[None]:
    """Repeat choices inside the block that `measuring` found at sizes around: nothing is timed, or compiled.

    Raises:
        NotRepeatedError: Attention is called more or less often.
    """
    left = iter(choices)
    token = _REPEATING.set(left)
    try:
        yield
    finally:
        _REPEATING.reset(token)
    if next(left, None) is not None:
        raise NotRepeatedError(f"attention was called less often than {len(choices)} times")


def repeated() -> str | None:
    """Return the choice of this call inside `repeating`; `None` outside.

    Raises:
        NotRepeatedError: There is none for it.
    """
    left = _REPEATING.get()
    if left is None:
        return None
    choice = next(left, None)
    if choice is None:
        raise NotRepeatedError("attention was called more often than at another size")
    return choice


def note_choice(backend: str) -> None:
    """Note the backend of a call inside `measuring`."""
    if (measured := _MEASURING.get()) is not None:
        measured.choices.append(backend)


def fastest(inputs: AttentionInputs, backends: Mapping[str, RunAttention]) -> str:
    """Return the name of the fastest backend for inputs of this size."""
    q, k = inputs.q, inputs.k
    sizes = inputs.max_seqlen_q, inputs.max_seqlen_k, inputs.left, inputs.right
    key = (q.device, q.dtype, q.shape, k.shape, *sizes, *backends)
    measured = _MEASURING.get()
    if key not in results and measured is not None and not torch.cuda.is_current_stream_capturing():
        results[key] = _time(inputs, backends)
    if key not in results:
        return next(iter(backends))
    if measured is not None:
        measured.per_square += results[key].per_square
    return results[key].fastest


def as_json(device: torch.device) -> list[Any]:
    """Return the results for a device in a form that JSON can hold."""
    found = []
    for key, timed in [*results.items()]:
        where, dtype, q, k, *rest = key
        if where == device and isinstance(q, torch.Size) and isinstance(k, torch.Size):
            found.append([str(dtype), [*q], [*k], rest[:4], rest[4:], timed.fastest, timed.per_square])
    return found


def checked(value: Any) -> list[Any]:
    """Return `value`, read from a file, after checking that it has the form that `as_json` writes."""
    for dtype, q, k, sizes, backends, name, per_square in value:
        hash(_key(torch.device("cpu"), dtype, q, k, sizes, backends))
        if name not in backends:
            raise ValueError(
                f"fastest attention backend {reprlib.repr(name)}: expected one of {reprlib.repr(backends)}"
            )
        number("per_square", per_square, zero=True)
    return list(value)


def learn(value: list[Any], device: torch.device) -> None:
    """Store results of `as_json` from a device of the same kind; results measured in this process take precedence."""
    for dtype, q, k, sizes, backends, name, per_square in value:
        results.setdefault(_key(device, dtype, q, k, sizes, backends), Timed(name, per_square))


def _key(
    device: torch.device, dtype: str, q: list[int], k: list[int], sizes: list[Any], backends: list[str]
) -> tuple[object, ...]:
    of = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(of, torch.dtype) or len(sizes) != 4:
        raise ValueError(
            f"attention of {dtype} with sizes {reprlib.repr(sizes)}: expected a dtype of torch and four sizes"
        )
    return device, of, torch.Size(q), torch.Size(k), *sizes, *backends


def _time(inputs: AttentionInputs, backends: Mapping[str, RunAttention]) -> Timed:
    """Time backends on the inputs as they are, and with the longest segments."""
    cases = [inputs, inputs.with_long_segments()] if inputs.is_self_attention else [inputs]
    times = {name: [_milliseconds(run, case) for case in cases] for name, run in backends.items()}
    name = min(times, key=lambda name: sum(times[name]))
    squares = [case.squares() for case in cases]
    if squares[-1] <= 2 * squares[0]:  # e.g. windows, which all have one length: the difference would be noise
        return Timed(name, 0.0)
    return Timed(name, max(0.0, (times[name][1] - times[name][0]) / (squares[1] - squares[0])))


def _milliseconds(run: RunAttention, inputs: AttentionInputs, repeats: int = 5) -> float:
    """Return the device time alone, as inside a graph: short launches are queued behind a wait that outlasts them."""
    run(inputs)
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    hosts = []
    start.record()
    for event in (middle, end):  # one of the runs may be held up
        begin = perf_counter()
        run(inputs)
        hosts.append(perf_counter() - begin)
        event.record()
    end.synchronize()
    shortest = float(min(start.elapsed_time(middle), middle.elapsed_time(end)))
    if 1e3 * max(hosts) < UNHIDDEN * shortest:
        return shortest
    launching = min(repeats * min(hosts), LONGEST_WAIT_S)
    torch.cuda._sleep(int(CYCLES_PER_S * (0.001 + 2 * launching)))
    start.record()
    for _ in range(repeats):
        run(inputs)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats
