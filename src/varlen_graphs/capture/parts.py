"""The modules that a forward may run, with their training mode and hooks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import nn
from torch.utils.hooks import RemovableHandle

from varlen_graphs.shadows.shadow import held_by

INERT = {
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.GELU, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleDict,
    nn.ModuleList, nn.RMSNorm, nn.ReLU, nn.Sequential, nn.SiLU,
}  # fmt: skip
"""Most modules of a tower: they do the same in training and evaluation."""

RECORDING = "transformers.utils.output_capturing."
"""Module of transformers whose hooks do nothing unless a call asks to record outputs. They stay after such a call."""

HOOK_ATTRIBUTES = frozenset({
    "_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_output_capturing_hooks_installed",
})  # fmt: skip
"""Attributes of a module that only say which forward hooks it has; `ModuleParts.hooked` looks at the hooks.

The last one is set by transformers with its hooks that record.
"""

LIBRARY_HOOKS = {
    RECORDING: False,
    "torch.nn.utils.spectral_norm.": False,  # compute a weight from others, in each run
    "torch.nn.utils.weight_norm.": False,
    "torch.distributed.tensor.": False,  # shard what the module computes: a part of it, which graphs hold
    "transformers.modeling_utils.PreTrainedModel.enable_input_require_grads.": True,
}
"""Hooks that libraries leave on modules, by where they are defined, and whether they act in grad mode.

Without grad, graphs repeat all that they do. What any other hook does, such as recording its arguments, is not known.
"""

EVALUATION: tuple[bool, ...] = ()
"""Training mode of parts that are all in evaluation."""

_TRAINING = itemgetter("training")


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
        held = [*_held(module, others)]
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
            acting = {*map(_acts, _hooks_of(self.modules))}
            if None in acting:
                return True
            self.hooks_seen, self.hooks_in_grad_mode = registered, True in acting
        return self.hooks_in_grad_mode and torch.is_grad_enabled()


def is_hooked(module: nn.Module) -> bool:
    """Return True if a forward hook would see runs of a module, or of a registered part, and may do so in any mode."""
    return None in map(_acts, _hooks_of(module.modules()))


def _hooks_of(modules: Iterable[nn.Module]) -> Iterator[Callable[..., Any]]:
    """Yield the forward hooks of modules, and those of the process."""
    for module in modules:
        yield from module._forward_hooks.values()
        yield from module._forward_pre_hooks.values()
    yield from torch_module._global_forward_hooks.values()
    yield from torch_module._global_forward_pre_hooks.values()


def part_in_training(module: nn.Module) -> str | None:
    """Return the path of a registered part that is in training mode, where that matters; `None` if there is none."""
    parts = module.named_modules()
    return next((path for path, part in parts if part.training and (not path or type(part) not in INERT)), None)


def records_outputs(hook: Any) -> bool:
    """Return True for a hook with which transformers records outputs, in calls that ask for them."""
    return _defined(hook).startswith(RECORDING)


def _acts(hook: Any) -> bool | None:
    """Return True for a hook that acts in grad mode alone, False for one that never does, `None` for any other."""
    defined = _defined(hook)
    return next((acts for place, acts in LIBRARY_HOOKS.items() if defined.startswith(place)), None)


def _defined(hook: Any) -> str:
    return f"{getattr(hook, '__module__', None)}.{getattr(hook, '__qualname__', None)}"


def _expected(path: str, expected: Mapping[str, bool]) -> bool:
    while path not in expected:
        path = path.rpartition(".")[0]
    return expected[path]


def _held(module: nn.Module, others: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are held but not registered, with their paths, without those around the module."""
    registered, held = {*module.modules()}, [one for one in held_by(module, others) if isinstance(one.value, nn.Module)]
    around = {part for one in held if module in (inside := {*one.value.modules()}) for part in inside}
    yield from ((one.path, one.value) for one in held if one.value not in registered | around)
