"""The modules that a forward may run, with their training mode and hooks."""

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch.nn.modules.module as torch_module
from torch import nn

from varlen_graphs.watch.owners import reachable_values

INERT = {
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.GELU, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleDict,
    nn.ModuleList, nn.RMSNorm, nn.ReLU, nn.Sequential, nn.SiLU,
}  # fmt: skip
"""Most modules of a tower: they do the same in training and evaluation."""

_TRAINING = itemgetter("training")


class ModuleParts:
    """Modules that a forward may run, as found once: registered ones, and others in lists, closures and globals.

    Args:
        module: The module.
        also: Other callables and objects to search, by name.
        expected: Expected training mode of each part by path; paths that are not there yet are added. A submodule that
            came later is expected to be in the mode of the module that it came into. An unregistered module, which
            `module.eval()` does not reach, is expected to be as it is when it is first found.

    Attributes:
        named: All parts and their paths.
        modules: All parts.
        expects_training: True if a part is expected to be in training mode.
    """

    def __init__(self, module: nn.Module, also: Mapping[str, Any], expected: dict[str, bool]) -> None:
        first = not expected
        registered, others = [*module.named_modules()], [*_unregistered(module, also)]
        for path, part in others if not first else (*registered, *others):
            expected.setdefault(path, part.training)
        self.named = [*registered, *others]
        self.modules = [part for _, part in self.named]
        watched = [(path, part) for path, part in self.named if part is module or type(part) not in INERT]
        plain = [(path, part) for path, part in watched if "training" in vars(part)]
        scripts = [(path, part) for path, part in watched if "training" not in vars(part)]
        self._flags = [vars(part) for _, part in plain]
        self._scripts = [part for _, part in scripts]
        self._expected = [_expected(path, expected) for path, _ in (*plain, *scripts)]
        self.expects_training = any(self._expected)

    def hooks(self) -> Iterator[Any]:
        """Yield the forward hooks of all parts, and those of the process."""
        for part in self.modules:
            yield from part._forward_hooks.values()
            yield from part._forward_pre_hooks.values()
        yield from torch_module._global_forward_hooks.values()
        yield from torch_module._global_forward_pre_hooks.values()

    def trains(self) -> bool:
        """Return True if a part is in training mode now."""
        return any(map(_TRAINING, self._flags)) or any(script.training for script in self._scripts)

    def training_changed(self) -> bool:
        """Return True if a part is in another training mode than expected, and not all are in evaluation."""
        if not self.expects_training and not self._scripts:  # nearly always: a module in evaluation
            return any(map(_TRAINING, self._flags))
        flags = [*map(_TRAINING, self._flags), *(script.training for script in self._scripts)]
        return flags != self._expected and any(flags)


def part_in_training(module: nn.Module) -> str | None:
    """Return the path of a registered part that is in training mode, where that matters; `None` if there is none."""
    parts = module.named_modules()
    return next((path for path, part in parts if part.training and (not path or type(part) not in INERT)), None)


def _expected(path: str, expected: Mapping[str, bool]) -> bool:
    while path not in expected:
        path = path.rpartition(".")[0]
    return expected[path]


def _unregistered(module: nn.Module, also: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the unregistered modules that a module reaches, with their paths, without those that contain it."""
    for found in reachable_values(module, also):
        if not isinstance(found.value, nn.Module) or found.holder is not None:
            continue
        inside = [*found.value.named_modules(prefix=found.path)]
        if all(part is not module for _, part in inside):
            yield from inside
