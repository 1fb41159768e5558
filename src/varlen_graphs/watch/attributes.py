"""What Python does in the forward of a module, as far as it can be compared: a graph holds what it was."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

NUMBERS = (bool, int, float, str)


class Attributes:
    """The class, forward, numbers and strings of each submodule, as they are now.

    What the forward itself changes, as counters do, is none of them. `training` is looked at by every call, elsewhere.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = [(path, m) for path, m in module.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._kinds = [(path, owner, type(owner), _own_forward(owner)) for path, owner in owners]
        self._values = [
            (path, vars(owner), {name: value for name, value in vars(owner).items() if _is_compared(name, value)})
            for path, owner in owners
        ]

    def run(self) -> None:
        """Leave out what is not as it was, because a run of the module has just changed it."""
        for _, own, values in self._values:
            for name in [name for name, value in values.items() if not _same(own.get(name), value)]:
                del values[name]

    def changes(self) -> Iterator[str]:
        """What is not as it was."""
        for path, owner, kind, forward in self._kinds:
            what = repr(path or "the module")
            if type(owner) is not kind:
                yield f"{what} is a {type(owner).__name__} now, and was a {kind.__name__}"
            if _own_forward(owner) != forward:
                yield f"{what} has another forward"
        for path, own, values in self._values:
            for name, value in values.items():
                now = own.get(name)
                if isinstance(now, NUMBERS) and not _same(now, value):
                    yield f"{f'{path}.{name}'.lstrip('.')!r} is {now!r} now, and was {value!r}"


def _is_compared(name: str, value: Any) -> bool:
    return isinstance(value, NUMBERS) and name != "training" and not name.startswith("_")


def _same(now: Any, value: Any) -> bool:
    return now is value or (type(now) is type(value) and bool(now == value))


def _own_forward(module: nn.Module) -> Any:
    """What was put in the place of a module's forward, unless that is an encoder of it."""
    forward = vars(module).get("forward")
    owner = getattr(forward, "__self__", forward)
    return None if type(owner).__module__.startswith("varlen_graphs.") else forward
