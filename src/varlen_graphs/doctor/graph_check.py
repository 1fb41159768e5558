"""The check of new graphs on the tape, for a module whose declaration follows from its calls."""

import re
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.declaration.buffer_spec import BufferSpec
from varlen_graphs.doctor.advice import named_tensors
from varlen_graphs.doctor.example_call import ExampleCall
from varlen_graphs.doctor.run_record import Occurrence
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.errors import VerificationError
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.grids import GridHW, GridTHW
from varlen_graphs.layouts.lengths import Lengths
from varlen_graphs.options.verify import Verify
from varlen_graphs.torch_dispatch.lines import Line

CHECKED_AT = Budget(256, items=16, segments=64)
"""Budget of the check: room for all synthetic items, and padding beside them."""

_AT = re.compile(r"^  at (?P<file>.*):(?P<number>\d+), in (?P<function>.*?): ", re.MULTILINE)


def wrong_replays(module: nn.Module, example: ExampleCall, otherwise: Line) -> list[Occurrence]:
    """Return what the check of graphs for an example finds, at its line if it names one.

    Checks nothing if the call has other arguments than rows and items, if the module is not on the CPU, or if it cannot
    be captured with these alone.
    """
    found = _declared(module, example)
    if found is None or any(tensor.device.type != "cpu" for tensor in module.state_dict().values()):
        return []
    spec, call = found
    encoder = GraphedEncoder(module, [CHECKED_AT], spec, backend="tape", verify=Verify(strict=True))
    try:
        with torch.no_grad():
            encoder.capture(call)
    except VerificationError as error:
        _, *evidence = str(error).splitlines()
        place = _AT.search(str(error))
        line = otherwise if place is None else Line(place["file"], int(place["number"]), place["function"])
        return [Occurrence("wrong replay", evidence[0], line, "")]
    except Exception:  # of a module that no graph can hold, which is reported already
        return []
    return []


def _declared(module: nn.Module, example: ExampleCall) -> tuple[BufferSpec, dict[str, Any]] | None:
    """Return the declaration of a module that takes rows alone, or rows and their items, and the call; else `None`."""
    by_name = {name: value for name, value in example.kwargs.items() if isinstance(value, Tensor)}
    given = {**named_tensors(module, example), **by_name}  # the module may take any arguments by name
    if not given or len(given) != len(example.args) + len(example.kwargs):
        return None
    name = max(given, key=lambda one: given[one].numel())
    rows, others = given.pop(name), given
    if rows.dim() == 0 or rows.is_complex() or len(others) > 1:
        return None
    layout: LayoutArgument | None = Lengths("lengths_of_items")
    call: dict[str, Any] = {name: rows, "lengths_of_items": [len(rows)]}
    for items_name, items in others.items():
        layout, call = _layout(items_name, items, len(rows)), {name: rows, items_name: items}
    if layout is None:
        return None
    floating = rows.is_floating_point()
    pad = 0 if floating or not rows.numel() else int(rows.min())
    packed = InputRows(name, tuple(rows.shape[1:]), None if floating else rows.dtype, pad)
    return BufferSpec(packed, layout, declared_by="recipe"), call


def _layout(name: str, items: Tensor, rows: int) -> LayoutArgument | None:
    if items.is_floating_point() or items.dim() not in (1, 2) or not items.numel():
        return None
    columns = items[:, None] if items.dim() == 1 else items
    if sum(prod(item) for item in columns.tolist()) != rows:
        return None
    kinds: dict[int, type[GridTHW | GridHW | Lengths]] = {1: Lengths, 2: GridHW, 3: GridTHW}
    kind = kinds.get(columns.shape[1]) if items.dim() == 2 or columns.shape[1] == 1 else None
    return None if kind is None else kind(name)
