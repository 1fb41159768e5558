"""Random numbers of their own for runs beside calls, which take none from the generators of the process."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.torch_dispatch.leaves import tensors_in
from varlen_graphs.torch_dispatch.rules import has_tag

SEED = 0

aten = torch.ops.aten


class RandomStream:
    """Generators from which watched runs of a shadow draw.

    Equal runs of two shadows draw equal numbers. The generators of the process are neither read nor set, because other
    threads draw from them at the same time.

    Attributes:
        missed: True once an operator has drawn that takes no generator, such as attention with dropout.
    """

    def __init__(self) -> None:
        self.missed = False
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def was_drawn(self) -> bool:
        """True once an operator has drawn."""
        return self.missed or bool(self._generators)

    def restart(self) -> None:
        """Let the next run draw what the first one drew."""
        for generator in self._generators.values():
            generator.manual_seed(SEED)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the operator to run in place of one, and its keyword arguments: those that draw get a generator."""
        if not _is_random(func) or kwargs.get("generator") is not None:
            return func, kwargs
        drawing = _with_generator(func)
        if drawing is None:
            self.missed |= _draws(func, args, kwargs)
            return func, kwargs
        return drawing, {**kwargs, "generator": self._of(_device_of(args, kwargs))}

    def _of(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(SEED)
        return self._generators[device]


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which an operator draws."""
    if (given := kwargs.get("device")) is not None:
        return torch.device(given)
    return next((tensor.device for tensor in tensors_in(args, kwargs)), torch.device("cpu"))


@functools.cache
def _is_random(func: Any) -> bool:
    return has_tag(func, torch.Tag.nondeterministic_seeded)


@functools.cache
def _with_generator(func: Any) -> Any:
    """Return the overload of an operator that takes a generator; `None` if there is none."""
    if func is aten.native_dropout.default:
        return _dropout
    names = {*_names(func)} | {"generator"}
    overloads = [func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())]
    return next((one for one in overloads if {*_names(one)} == names), None)


def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return False for attention without dropout, whose operators may draw."""
    given = dict(zip(_names(func), args, strict=False)) | kwargs
    return bool(given.get("dropout_p", True))


def _dropout(input: Tensor, p: float, train: bool | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Compute `aten.native_dropout` with a generator."""
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return input * mask / (1 - p) if p < 1 else torch.zeros_like(input), mask
