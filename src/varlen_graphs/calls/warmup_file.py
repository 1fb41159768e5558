"""Save the measurements of a start for the next start: a file with a section an encoder."""

import hashlib
import importlib.metadata
import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from varlen_graphs.attention import timing
from varlen_graphs.budgets.budget import Budget
from varlen_graphs.checks.values import quoted
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.errors import InputError
from varlen_graphs.files import DAMAGED, integer, write_whole
from varlen_graphs.outputs.declared import extents
from varlen_graphs.routing.costs import Costs
from varlen_graphs.torch_dispatch.sharded import sharding

FORMAT = "2"
"""Version of the file format. Files of another version are ignored."""


OF_SETUP = ("format", "varlen_graphs", "torch", "triton")
"""Entries of an identity that all encoders of a process share."""

_writing = threading.Lock()  # sections of others are read before they are written again
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_writing._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass
class WarmupSection:
    """Measurements of an encoder's start, and the setup that they hold for.

    Attributes:
        name: Name of the encoder among those of the file.
        identity: Versions, device, module and declaration; see `identity_of`.
        costs: Costs of replays, if measured.
        used: Number of calls of each budget, by static arguments. Static arguments that JSON cannot hold are not saved.
        attention: Timings of attention backends, as `timing.as_json` returns them.
    """

    name: str
    identity: dict[str, str]
    costs: Costs | None
    used: list[tuple[dict[str, Any], dict[Budget, int]]]
    attention: list[Any]

    def as_json(self) -> dict[str, Any]:
        """Return the section as JSON holds it."""
        return {
            "name": self.name,
            "identity": self.identity,
            "costs": self.costs.as_json() if self.costs is not None else None,
            "used": [
                [
                    static_args,
                    [[b.rows, b.items, b.segments, b.max_seqlen, calls] for b, calls in sorted(budgets.items())],
                ]
                for static_args, budgets in self.used
            ],
            "attention": self.attention,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "WarmupSection":
        """Return a section from what `as_json` returned; a damaged one raises one of `DAMAGED`."""
        costs = None if value["costs"] is None else Costs.from_json(value["costs"])
        used = [({**static_args}, _counts(budgets)) for static_args, budgets in value["used"]]
        return cls(str(value.get("name")), _identity(value), costs, used, timing.checked(value["attention"]))


def read_section(path: str | os.PathLike[str], name: str, identity: Mapping[str, str]) -> WarmupSection | None:
    """Return the section of an encoder; `None` if there is no file.

    It is found by its identity, and of those that several alike encoders wrote by its name: so an encoder finds its own
    in the file of a whole model, and one that was written alone.

    Raises:
        InputError: The file is not a valid warm-up file, cannot be read, or has no section of this identity.
    """
    try:
        sections = _sections(path)
        alike = [one for one in sections if _identity(one) == identity]
        if alike:
            return WarmupSection.from_json(next((one for one in alike if one.get("name") == name), alike[0]))
        named = next((one for one in sections if one.get("name") == name), None)
        other = sections[0] if named is None and len(sections) == 1 else named
        found = {} if other is None else _identity(other)
        names = ", ".join(str(one.get("name")) for one in sections)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path} is not a warm-up file ({error!r}): expected a file that can be read") from error
    except DAMAGED as error:
        raise InputError(
            f"{path} is not a warm-up file ({error!r}): expected a file from `encoder.save_warmup`; remove it to "
            "start without one"
        ) from error
    if not found:
        raise InputError(f"{path} has nothing of {name}, but of {quoted(names)}")
    differences = [key for key in {**identity, **found} if identity.get(key) != found.get(key)]
    what = "; ".join(f"{key} is {found.get(key)}, not {identity.get(key)}" for key in differences)
    raise InputError(f"{path} was written for another setup: {shorten(what, 600)}")


def write_sections(path: str | os.PathLike[str], sections: Sequence[WarmupSection]) -> None:
    """Write sections to a JSON file atomically. Those of other encoders there stay, if they are of this setup."""
    own = [section.as_json() for section in sections]
    with _writing:
        try:
            there = [one for one in _sections(path) if _is_other(one, own)]
        except (OSError, *DAMAGED):  # none, or nothing that was worth keeping
            there = []
        write_whole(path, json.dumps({"encoders": [*there, *own]}) + "\n")


def _sections(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the sections of a file. That of an earlier version was one, and nothing else."""
    value = json.loads(Path(path).read_text(encoding="utf-8"))
    sections = [value] if "identity" in value else [*value["encoders"]]
    return [{**section} for section in sections]


def _identity(section: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(what) for name, what in section["identity"].items()}


def _is_other(section: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a section of a file is of the setup of own ones, but of another encoder."""
    for one in own:
        there, here = section["identity"], one["identity"]
        if there == here and section.get("name", one["name"]) == one["name"]:
            return False
        if any(there[name] != here[name] for name in OF_SETUP):
            return False
    return True


def identity_of(module: nn.Module, spec: BufferSpec, device: torch.device | None, *options: object) -> dict[str, str]:
    """Return the identity of a setup, for which measurements hold.

    It includes the module's class, and the names, shapes, dtypes and sharding of its weights. `options` are any other
    values that distinguish encoders.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    weights = [(name, tuple(tensor.shape), str(tensor.dtype), *sharding(tensor)) for name, tensor in named]
    packed, layout = spec.row_input, spec.layout
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
