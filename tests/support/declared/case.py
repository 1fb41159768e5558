"""An encoder, calls of it, and what it should return."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import varlen_graphs as vg
from tests.support.leftovers import keep_leftovers
from tests.support.towers import distance, equal_bits


class Case(NamedTuple):
    """An encoder, its calls, and a function of the same arguments that gives the expected output."""

    encoder: vg.GraphedEncoder
    calls: list[dict[str, Any]]
    expected: Callable[..., Any]


def graphed(module, budgets, spec, device, **options):
    """Return an encoder that refuses what it cannot prove."""
    torch.manual_seed(0)
    module = module.to(device).eval().requires_grad_(False)
    backend = "tape" if device == "cpu" else "cuda"
    return vg.GraphedEncoder(module, budgets, spec, backend=backend, verify=vg.options.Verify(strict=True), **options)


def alone(encoder, rows, items, whole=()):
    """Return a function that runs each item of a call alone and eager, and concatenates the outputs.

    `rows` and `items` name the arguments of the rows and of what belongs to the items, the layout first. All items get
    those in `whole`.
    """

    def run(**call):
        layout = call[items[0]]
        lengths = [len(x) for x in call[rows].split([_rows(item) for item in layout])]
        outs = []
        for i, x in enumerate(call[rows].split(lengths)):
            own = {name: call[name][i : i + 1] for name in items} | {name: call[name] for name in whole}
            outs.append(encoder.eager(x, **own))
        return torch.cat(outs)

    return run


def _rows(item):
    total = 1
    for side in item if isinstance(item, tuple | list) else (item,):
        total *= side
    return total


def check(case, tolerance):
    """Check the outputs of a case, the padding contract, and that nothing ran eager."""
    device = next(iter(case.encoder.module.parameters())).device
    calls = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.items()} for call in case.calls]
    for number, call in enumerate(calls):
        case.encoder(**call)
        case.encoder.poison()
        over_nan = case.encoder(**call)
        case.encoder(**calls[0])
        keep_leftovers(case.encoder)
        assert equal_bits(over_nan, case.encoder(**call)), number
        assert distance(over_nan, case.expected(**call)) <= tolerance, number
    assert not case.encoder.stats.eager
