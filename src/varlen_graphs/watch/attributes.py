"""Detection of changed Python attributes: a graph freezes the values that the forward read at capture."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from varlen_graphs.watch.shadow import Shadow

NUMBERS = (bool, int, float, str)


class AttributeSnapshot:
    """Snapshot of the Python attributes that a graph freezes: class, forward, numbers and strings of each submodule."""

    def __init__(self, module: nn.Module) -> None:
        owners = [(path, m) for path, m in module.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._owners = [owner for _, owner in owners]
        self._types = [(path, owner, type(owner), _forward_override(owner)) for path, owner in owners]
        self._values = [
            (path, vars(owner), {name: value for name, value in vars(owner).items() if _is_compared(name, value)})
            for path, owner in owners
        ]

    def drop_changed(self, shadow: Shadow) -> None:
        """Exclude the attributes that runs of a shadow have changed there."""
        for owner, values in zip(self._owners, (values for _, _, values in self._values), strict=True):
            own = vars(shadow.of(owner))
            for name in [name for name, value in values.items() if not _same(own.get(name), value)]:
                del values[name]

    def changes(self) -> Iterator[str]:
        """Describe each attribute that differs from the snapshot."""
        for path, owner, kind, forward in self._types:
            what = repr(path) if path else "the module"
            if type(owner) is not kind:
                yield f"the class of {what} changed from {kind.__name__} to {type(owner).__name__}"
            if _forward_override(owner) != forward:
                yield f"the forward of {what} was replaced"
        for path, own, values in self._values:
            for name, value in values.items():
                now = own.get(name)
                if issubclass(type(now), NUMBERS) and not _same(now, value):
                    yield f"{f'{path}.{name}'.lstrip('.')!r} changed from {value!r} to {now!r}"


CHECKED = ("training", "active_adapter")
"""Attributes that every call checks."""


def _is_compared(name: str, value: Any) -> bool:
    return issubclass(type(value), NUMBERS) and name not in CHECKED and not name.startswith("_")


def _same(now: Any, value: Any) -> bool:
    return now is value or (type(now) is type(value) and bool(now == value))


def _forward_override(module: nn.Module) -> Any:
    """Return the `forward` set on the instance; `None` if there is none, or that of its class, or one of an encoder."""
    forward = vars(module).get("forward")
    owner = getattr(forward, "__self__", forward)
    if owner is module and getattr(forward, "__func__", None) is type(module).forward:
        return None  # transformers 4.57 leaves it there where it has collected hidden states
    return None if type(owner).__module__.startswith("varlen_graphs.") else forward
