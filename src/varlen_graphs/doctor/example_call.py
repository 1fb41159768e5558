"""Example calls with which the doctor runs a module."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

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
    def rows_shape(self) -> torch.Size | None:
        """Shape of the largest tensor."""
        rows = max(self.tensors().values(), key=Tensor.numel, default=None)
        return None if rows is None or rows.is_nested else rows.shape

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, by argument and path in it."""
        return {name: leaf for name, leaf in self._leaves().items() if isinstance(leaf, Tensor)}

    def sizes(self) -> dict[str, int]:
        """Return the dimensions of the tensors, by name."""
        return {
            f"{name}.shape[{dim}]": size
            for name, tensor in self.tensors().items()
            if not tensor.is_nested
            for dim, size in enumerate(tensor.shape)
        }

    def numbers(self) -> dict[str, Number]:
        """Return the numbers and strings, named like tensors."""
        return {name: leaf for name, leaf in self._leaves().items() if isinstance(leaf, Number)}

    def copied(self, device: torch.device) -> "ExampleCall":
        """Return the call with its tensors on a device copied."""
        return ExampleCall(*tree_map_only(Tensor, lambda t: t.clone() if t.device.type == device.type else t, (*self,)))

    def _leaves(self) -> dict[str, Any]:
        named = {str(at): value for at, value in enumerate(self.args)} | self.kwargs
        flat = {name: tree_flatten_with_path(value)[0] for name, value in named.items()}
        return {f"{name}{keystr(path)}": leaf for name, leaves in flat.items() for path, leaf in leaves}


def group_by_rows(examples: Sequence[ExampleCall]) -> list[list[int]]:
    """Return the indices of calls, grouped by the shape of their rows."""
    groups: dict[torch.Size | None, list[int]] = {}
    for at, example in enumerate(examples):
        groups.setdefault(example.rows_shape, []).append(at)
    return list(groups.values())
