"""How fast backends are: timed while something is captured, once for each size of call."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varlen_graphs.attention.call import Call
from varlen_graphs.files import number

Run = Callable[[Call], Tensor]


@dataclass
class Attention:
    """The attention of one run of a module.

    Attributes:
        per_square: Milliseconds it takes for each squared row of a segment: the sum over all its calls.
    """

    per_square: float = 0.0


class _Timed(NamedTuple):
    fastest: str
    per_square: float


class _Measuring(threading.local):
    """What is being measured, by this thread: others may run attention meanwhile."""

    now: Attention | None = None


_measuring = _Measuring()
_timed: dict[tuple[object, ...], _Timed] = {}


@contextmanager
def measuring() -> Iterator[Attention]:
    """Inside, backends that take a call are timed, once for each size, and the fastest is remembered.

    Synchronizes with the device. Outside, `fastest` is what was found, or the first backend where nothing was.
    """
    before, now = _measuring.now, Attention()
    _measuring.now = now
    try:
        yield now
    finally:
        _measuring.now = before


def fastest(call: Call, backends: Mapping[str, Run]) -> str:
    """The name of the fastest of some backends for calls of this size."""
    q, k = call.q, call.k
    sizes = call.max_seqlen_q, call.max_seqlen_k, call.left, call.right
    key = (q.device, q.dtype, q.shape, k.shape, *sizes, *backends)
    measured = _measuring.now
    if key not in _timed and measured is not None and not torch.cuda.is_current_stream_capturing():
        _timed[key] = _time(call, backends)
    if key not in _timed:
        return next(iter(backends))
    if measured is not None:
        measured.per_square += _timed[key].per_square
    return _timed[key].fastest


def as_json(device: torch.device) -> list[Any]:
    """What was found on a device, as JSON takes it."""
    found = []
    for key, timed in [*_timed.items()]:
        where, dtype, q, k, *rest = key
        if where == device and isinstance(q, torch.Size) and isinstance(k, torch.Size):
            found.append([str(dtype), [*q], [*k], rest[:4], rest[4:], timed.fastest, timed.per_square])
    return found


def checked(value: Any) -> list[Any]:
    """What `as_json` gave, as it came.

    Raises:
        ValueError, TypeError: It is something else.
    """
    for dtype, q, k, sizes, backends, name, per_square in value:
        _key(torch.device("cpu"), dtype, q, k, sizes, backends)
        if name not in backends:
            raise ValueError(f"{name} of {backends}")
        number("per_square", per_square, zero=True)
    return list(value)


def learn(value: list[Any], device: torch.device) -> None:
    """Take in what `as_json` gave, for a device of the same kind; what was found here stays."""
    for dtype, q, k, sizes, backends, name, per_square in value:
        _timed.setdefault(_key(device, dtype, q, k, sizes, backends), _Timed(name, per_square))


def _key(
    device: torch.device, dtype: str, q: list[int], k: list[int], sizes: list[Any], backends: list[str]
) -> tuple[object, ...]:
    of = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(of, torch.dtype) or len(sizes) != 4:
        raise ValueError(f"{dtype} and {sizes}")
    return device, of, torch.Size(q), torch.Size(k), *sizes, *backends


def _time(call: Call, backends: Mapping[str, Run]) -> _Timed:
    """Time backends on a call as it is, and with the longest segments."""
    calls = [call, call.with_long_segments()] if call.is_self_attention else [call]
    times = {name: [_milliseconds(run, one) for one in calls] for name, run in backends.items()}
    name = min(times, key=lambda name: sum(times[name]))
    squares = [one.squares() for one in calls]
    if squares[-1] <= 2 * squares[0]:  # windows, say, are of one length: the difference would be noise
        return _Timed(name, 0.0)
    return _Timed(name, max(0.0, (times[name][1] - times[name][0]) / (squares[1] - squares[0])))


def _milliseconds(run: Run, call: Call, repeats: int = 5) -> float:
    """Time on the device alone, as inside a graph: launches are queued behind a wait that outlasts them."""
    run(call)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
    start.record()
    for _ in range(repeats):
        run(call)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats
