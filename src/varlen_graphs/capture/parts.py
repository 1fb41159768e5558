"""The modules that a forward may run, with their training mode and hooks."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

INERT = {
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.GELU, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleDict,
    nn.ModuleList, nn.RMSNorm, nn.ReLU, nn.Sequential, nn.SiLU,
}  # fmt: skip
"""Most modules of a tower: they do the same in training and evaluation."""

LIBRARY_HOOKS = {
    "transformers.utils.output_capturing.": False,  # do nothing unless the call asks to record outputs
    "torch.distributed.tensor.": False,  # shard what the module computes: a part of it, which graphs hold
    "transformers.modeling_utils.PreTrainedModel.enable_input_require_grads.": True,
}
"""Hooks that libraries leave on modules, by where they are defined, and whether they act in grad mode.

Without grad, graphs repeat all that they do. What any other hook does, such as recording its arguments, is not known.
"""

EVALUATION: tuple[bool, ...] = ()
"""Training mode of parts that are all in evaluation."""

DEPTH = 4
"""Attributes of parts are searched through this many levels of containers, objects and functions."""

MOST_ENTRIES = 1000
"""Entries of a container that are searched."""

_OF_ANY_MODULE = frozenset(vars(nn.Module()))
_TRAINING = itemgetter("training")
_PLAIN: Any = object.__getattribute__


class ModuleParts:
    """Modules that a forward may run, as found once: registered ones, and others that these hold.

    A part holds what lies in its attributes, in lists, dicts, tuples and objects there, and what the functions there
    are bound to or close over. Globals and attributes of classes are nobody's own.

    Args:
        module: The module.
        others: Other callables and objects that run, by name.
        expected: Expected training mode of each part by path; paths that are not there yet are added. A submodule that
            came later is expected to be in the mode of the module that it came into. An unregistered module, which
            `module.eval()` does not reach, is expected to be as it is when it is first found.

    Attributes:
        named: All parts and their paths.
        modules: All parts.
        expected: The training mode of parts that is expected, as `training` returns it.
        hooks_seen: Number of hooks of the process when the parts had none that acts without grad; -1 before.
        hooks_in_grad_mode: True if they had some that act in grad mode.
    """

    def __init__(self, module: nn.Module, others: Mapping[str, Any], expected: dict[str, bool]) -> None:
        first = not expected
        registered = [*module.named_modules()]
        held = [*_held(module, registered, others)]
        for path, part in (*registered, *held) if first else held:
            expected.setdefault(path, part.training)
        self.named = [*registered, *held]
        self.modules = [part for _, part in self.named]
        watched = [(path, part) for path, part in self.named if part is module or type(part) not in INERT]
        plain = [(path, part) for path, part in watched if "training" in vars(part)]
        scripts = [(path, part) for path, part in watched if "training" not in vars(part)]
        self._flags = [vars(part) for _, part in plain]  # faster than the attributes
        self._scripts = [part for _, part in scripts]
        flags = [_expected(path, expected) for path, _ in (*plain, *scripts)]
        self.expected = tuple(flags) if any(flags) else EVALUATION
        self.hooks_seen, self.hooks_in_grad_mode = -1, False

    def training(self) -> tuple[bool, ...]:
        """Return the training mode of each part, or `EVALUATION`."""
        if not self._scripts and not any(map(_TRAINING, self._flags)):  # nearly always
            return EVALUATION
        flags = (*map(_TRAINING, self._flags), *(script.training for script in self._scripts))
        return flags if any(flags) else EVALUATION

    def hooked(self) -> bool:
        """Return True if a forward hook would see a call made now, which no replay runs."""
        registered = RemovableHandle.next_id  # counts the hooks of the process, so most calls need not look
        if registered != self.hooks_seen:
            acting = {_acts(hook) for hook in self._hooks()}
            if None in acting:
                return True
            self.hooks_seen, self.hooks_in_grad_mode = registered, True in acting
        return self.hooks_in_grad_mode and torch.is_grad_enabled()

    def _hooks(self) -> Iterator[Callable[..., Any]]:
        """Yield the forward hooks of all parts, and those of the process."""
        for part in self.modules:
            yield from part._forward_hooks.values()
            yield from part._forward_pre_hooks.values()
        yield from torch_module._global_forward_hooks.values()
        yield from torch_module._global_forward_pre_hooks.values()


def part_in_training(module: nn.Module) -> str | None:
    """Return the path of a registered part that is in training mode, where that matters; `None` if there is none."""
    parts = module.named_modules()
    return next((path for path, part in parts if part.training and (not path or type(part) not in INERT)), None)


def _acts(hook: Any) -> bool | None:
    """Return True for a hook that acts in grad mode alone, False for one that never does, `None` for any other."""
    defined = f"{getattr(hook, '__module__', None)}.{getattr(hook, '__qualname__', None)}"
    return next((acts for place, acts in LIBRARY_HOOKS.items() if defined.startswith(place)), None)


def _expected(path: str, expected: Mapping[str, bool]) -> bool:
    while path not in expected:
        path = path.rpartition(".")[0]
    return expected[path]


def _held(
    module: nn.Module, registered: Sequence[tuple[str, nn.Module]], others: Mapping[str, Any]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are held but not registered, with their paths, without those that contain the module."""
    seen = {id(part) for _, part in registered}
    reached = deque([(f"{path}{at}", value, DEPTH) for path, part in registered for at, value in _attributes(part)])
    reached += [(name, value, DEPTH) for name, value in others.items()]
    while reached:
        path, value, depth = reached.popleft()
        if id(value) in seen or type(value).__module__.startswith("varlen_graphs."):
            continue
        seen.add(id(value))
        if not issubclass(type(value), nn.Module):
            inside = _contents(value)
        elif any(part is module for part in value.modules()):
            continue
        else:
            parts = [*value.named_modules(prefix=path)]
            yield from parts
            seen.update(id(part) for _, part in parts)
            inside = (
                (f"{inner.removeprefix(path)}{at}", own) for inner, part in parts for at, own in _attributes(part)
            )
        if depth:
            reached += [(f"{path}{at}", own, depth - 1) for at, own in inside]


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a part beside those that every module has."""
    if not isinstance(part, torch.jit.ScriptModule):
        yield from [(f".{name}", value) for name, value in vars(part).items() if name not in _OF_ANY_MODULE]


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container, an object or a function holds. Only its type is asked: its own code may raise."""
    kind = type(value)
    if issubclass(kind, dict):
        yield from [(f"[{at}]", part) for at, part in enumerate([*dict.values(value)][:MOST_ENTRIES])]
    elif issubclass(kind, list | tuple | set | frozenset | deque):
        yield from [(f"[{at}]", part) for at, part in enumerate([*kind.__iter__(value)][:MOST_ENTRIES])]
    elif kind is FunctionType:
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from [(f".{name}", cell) for name, cell in cells]
    elif kind is CellType:
        with suppress(ValueError):  # an empty one
            yield "", value.cell_contents
    elif kind is MethodType:
        yield from (("", value.__func__), (".__self__", value.__self__))
    elif kind is partial:
        yield from (("", value.func), (".args", value.args), (".keywords", value.keywords))
    elif kind.__getattribute__ is _PLAIN and not issubclass(kind, Tensor):
        yield from [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
