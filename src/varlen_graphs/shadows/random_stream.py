"""Random numbers for runs beside calls, which leave the generators of the process as they were."""

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varlen_graphs.dispatch.thread_modes import unwatched


class _Generator(NamedTuple):
    """A default generator of the process: its state, something to compare that by, and how to set it."""

    state: Any
    bits: Any
    set: Callable[[Any], object]


class RandomStream:
    """The random numbers of a shadow's runs. The default generators of the process are as before after each run.

    The first run draws what the module itself would draw next, and later ones go on from there. A generator from which
    nothing is drawn is not touched.

    Args:
        device: The device of the module; `None` if it has no tensors.

    Attributes:
        drew: True once a run has drawn random numbers.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._first: list[_Generator] = []
        self._next: list[_Generator] = []
        self._before: list[_Generator] = []
        self.drew = False

    def restart(self) -> None:
        """Let the next run draw what the first one drew."""
        self._next = self._first if self.drew else []

    def __enter__(self) -> None:
        """Give the generators the states of this stream."""
        self._before = _generators(self._device)
        self._first = self._first or self._before
        _set(self._next, self._before)

    def __exit__(self, *error: object) -> None:
        """Give the generators the states of the process."""
        now, entered = _generators(self._device), self._next or self._before
        if [one.bits for one in now] != [one.bits for one in entered]:
            self.drew, self._next = True, now
        _set(self._before, now)


def _generators(device: torch.device | None) -> list[_Generator]:
    numpy: Any = sys.modules.get("numpy")
    found = [_of_torch(torch.default_generator)]
    if device is not None and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        with suppress(RuntimeError):  # another thread captures a graph with it
            index = torch.cuda.current_device() if device.index is None else device.index
            found.append(_of_torch(torch.cuda.default_generators[index]))
    own = random.getstate()
    found.append(_Generator(own, own, random.setstate))
    if numpy is not None:
        name, keys, *more = theirs = numpy.random.get_state()
        found.append(_Generator(theirs, (name, keys.tobytes(), *more), numpy.random.set_state))
    return found


def _of_torch(generator: torch.Generator) -> _Generator:
    with unwatched():
        state: Tensor = generator.get_state()
        return _Generator(state, state.numpy().tobytes(), generator.set_state)


def _set(states: list[_Generator], now: list[_Generator]) -> None:
    """Set the states that differ from those of now."""
    if len(states) == len(now):  # else a capture has begun or ended meanwhile
        for one, other in zip(states, now, strict=True):
            if one.bits != other.bits:
                with unwatched():
                    one.set(one.state)
