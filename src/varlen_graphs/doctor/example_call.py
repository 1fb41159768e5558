"""Example calls with which the doctor runs a module."""

import inspect
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

MOST_COLUMNS = 3
"""A table of items has up to this many: frames, height and width."""

Number = bool | int | float | complex | str


class ExampleCall(NamedTuple):
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, call: Any) -> "ExampleCall":
        """Wrap a dict of keyword arguments, a tuple of positional ones, or a single argument."""
        if isinstance(call, Mapping):
            return cls((), dict(call))
        return cls(call if isinstance(call, tuple) else (call,), {})

    @property
    def rows_shape(self) -> torch.Size | int | None:
        """Shape of the largest tensor; of a list of tensors, the number of their elements."""
        tensors = self.tensors()
        name = max(tensors, key=lambda own: tensors[own].numel(), default=None)
        if name is None or tensors[name].is_nested:
            return None
        return tensors[name].shape if name in self.arguments() else sum(own.numel() for own in tensors.values())

    @property
    def device(self) -> torch.device:
        """Device of the first tensor, or the CPU."""
        return next((one.device for one in self.tensors().values()), torch.device("cpu"))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments, positional ones by their number."""
        return {str(at): value for at, value in enumerate(self.args)} | self.kwargs

    def named(self, module: nn.Module) -> Mapping[str, Any]:
        """Return the arguments by the names that the forward of a module has for them."""
        try:
            return inspect.signature(module.forward).bind_partial(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            return self.kwargs

    def replaced(self, others: Mapping[str, Any]) -> "ExampleCall":
        """Return the call with other values of some arguments."""
        args = tuple(others.get(str(at), value) for at, value in enumerate(self.args))
        return ExampleCall(args, {name: others.get(name, value) for name, value in self.kwargs.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, by argument and path in it."""
        return {name: leaf for name, leaf in self._leaves().items() if isinstance(leaf, Tensor)}

    def sizes(self) -> dict[str, int]:
        """Return the dimensions of tensors by name, not of those in lists: their sizes are those of items."""
        return {
            f"{name}.shape[{dim}]": size
            for name, tensor in self.arguments().items()
            if isinstance(tensor, Tensor) and not tensor.is_nested
            for dim, size in enumerate(tensor.shape)
        }

    def numbers(self) -> dict[str, Number]:
        """Return the numbers and strings, named like tensors."""
        return {name: leaf for name, leaf in self._leaves().items() if isinstance(leaf, Number)}

    def copied(self, device: torch.device) -> "ExampleCall":
        """Return the call with its tensors on a device copied."""
        return ExampleCall(*tree_map_only(Tensor, lambda t: t.clone() if t.device.type == device.type else t, (*self,)))

    def _leaves(self) -> dict[str, Any]:
        flat = {name: tree_flatten_with_path(value)[0] for name, value in self.arguments().items()}
        return {f"{name}{keystr(path)}": leaf for name, leaves in flat.items() for path, leaf in leaves}


def items_in(value: Any) -> Tensor | None:
    """Return integers that may describe items, `[items]` or `[items, columns]`."""
    if isinstance(value, Tensor):
        integers = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or value.is_nested)
        narrow = value.dim() == 1 or (value.dim() == 2 and value.shape[1] <= MOST_COLUMNS)
        return value if integers and narrow and value.numel() else None
    if not isinstance(value, list | tuple) or not value:
        return None
    entries = [entry if isinstance(entry, list | tuple) else [entry] for entry in value]
    if len({len(entry) for entry in entries}) > 1 or not all(type(number) is int for number in chain(*entries)):
        return None
    return torch.tensor([*map(list, entries)] if isinstance(value[0], list | tuple) else [*value], device="cpu")


def group_by_rows(examples: Sequence[ExampleCall]) -> list[list[int]]:
    """Return the indices of calls, grouped by the shape of their rows."""
    groups: dict[torch.Size | int | None, list[int]] = {}
    for at, example in enumerate(examples):
        groups.setdefault(example.rows_shape, []).append(at)
    return list(groups.values())
