"""Save the measurements of an encoder's start for the next start."""

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from varlen_graphs.attention import timing
from varlen_graphs.errors import InputError, warn
from varlen_graphs.files import DAMAGED, integer, write_whole
from varlen_graphs.layout.budgets import Budget
from varlen_graphs.routing.costs import Costs
from varlen_graphs.spec.buffer_spec import BufferSpec
from varlen_graphs.spec.declared_outputs import extents
from varlen_graphs.watch.sharded import sharding

FORMAT = "2"
"""Version of the file format. Files of another version are ignored."""


@dataclass
class WarmupFile:
    """Measurements of a start, and the setup that they hold for.

    Attributes:
        identity: Versions, device, module and declaration; see `identity_of`.
        costs: Costs of replays, if measured.
        used: Number of calls of each budget, by static arguments. Static arguments that JSON cannot hold are not saved.
        attention: Timings of attention backends, as `timing.as_json` returns them.
    """

    identity: dict[str, str]
    costs: Costs | None
    used: list[tuple[dict[str, Any], dict[Budget, int]]]
    attention: list[Any]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file atomically."""
        value = {
            "identity": self.identity,
            "costs": self.costs.as_json() if self.costs is not None else None,
            "used": [
                [statics, [[b.rows, b.items, b.segments, b.max_seqlen, calls] for b, calls in sorted(budgets.items())]]
                for statics, budgets in self.used
            ],
            "attention": self.attention,
        }
        write_whole(path, json.dumps(value) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str], identity: Mapping[str, str]) -> "WarmupFile | None":
        """Read a file written by `save`; `None` if there is none, or, with a warning, if its identity differs.

        Raises:
            InputError: The file is not a valid warm-up file.
        """
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
            found = {str(name): str(what) for name, what in value["identity"].items()}
            differences = [name for name in {**identity, **found} if identity.get(name) != found.get(name)]
            if differences:
                what = "; ".join(f"{name} is {found.get(name)}, not {identity.get(name)}" for name in differences)
                warn(f"{path} was written for another setup, so it is ignored and everything is measured again: {what}")
                return None
            costs = None if value["costs"] is None else Costs.from_json(value["costs"])
            used = [({**statics}, _counts(budgets)) for statics, budgets in value["used"]]
            return cls(found, costs, used, timing.checked(value["attention"]))
        except FileNotFoundError:
            return None
        except DAMAGED as error:
            raise InputError(
                f"{path} is not a warm-up file ({error!r}): expected a file from `encoder.save_warmup`; remove it to "
                "start without one"
            ) from error


def identity_of(module: nn.Module, spec: BufferSpec, device: torch.device | None, *options: object) -> dict[str, str]:
    """Return the identity of a setup, for which measurements hold.

    It includes the module's class, and the names, shapes, dtypes and sharding of its weights. `options` are any other
    values that distinguish encoders.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    weights = [(name, tuple(tensor.shape), str(tensor.dtype), *sharding(tensor)) for name, tensor in named]
    packed, layout = spec.packed, spec.layout
    declared: list[object] = [packed.name, packed.shape, packed.dtype, packed.normalize is not None]
    declared += [
        type(layout).__name__,
        layout.name,
        layout.merge,
        layout.prefix,
        [column.name for column in layout.columns],
    ]
    declared += [[type(extent).__name__ for extent in extents(spec.declared)], spec.row_multiple, *options]
    declared += [(type(buffer).__name__, buffer.name) for buffer in spec.buffers]
    return {
        "format": FORMAT,
        "varlen_graphs": vars(sys.modules["varlen_graphs"])["__version__"],
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "device": torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else "cpu",
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "weights": _digest(weights),
        "declaration": _digest(declared),
    }


def _counts(value: Any) -> dict[Budget, int]:
    return {Budget(*capacities): integer("calls", calls, zero=True) for *capacities, calls in value}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _digest(parts: Iterable[object]) -> str:
    return hashlib.sha256(repr([*parts]).encode()).hexdigest()[:16]
