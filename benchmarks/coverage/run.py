"""Wrap one model and call it, with and without graphs."""

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import varlen_graphs as vg
from benchmarks.coverage.calls import Form, find, forms
from benchmarks.coverage.tiny import make

PADDED = [vg.Budget.padded(8, length) for length in (32, 128)]
PACKED = [vg.Budget(rows, items=12, segments=rows // 4) for rows in (512, 4096)]


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of an output, in their order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for part in output.values():
            yield from tensors(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors(part)


def error(came: Any, expected: Any) -> float:
    """Relative L2 of the worst tensor; infinite where one is missing or has another shape."""
    mine, theirs = [*tensors(came)], [*tensors(expected)]
    if [x.shape for x in mine] != [x.shape for x in theirs]:
        return float("inf")
    worst = 0.0
    for a, b in zip(mine, theirs, strict=True):
        distance = ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()
        worst = max(worst, distance if distance == distance else float("inf"))
    return worst


def real(output: Any, call: dict[str, Any]) -> Any:
    """An output with zeros in place of the rows that pad a text: what a model leaves there means nothing."""
    mask = call.get("attention_mask")
    if mask is None or "input_ids" not in call:
        return output
    return [x * mask[..., None] if x.shape[:2] == mask.shape and x.dim() == 3 else x for x in tensors(output)]


def budgets_for(encoder: vg.GraphedEncoder) -> Any:
    """Few budgets that hold the calls of every form."""
    layout = encoder.spec.layout
    return [2, 8] if layout.one_row else PADDED if layout.padded else PACKED


def accepted(model: nn.Module, candidates: list[Form]) -> tuple[Form, list[Any]] | str:
    """The first form that a model takes, with its outputs; or why it takes none."""
    reasons = []
    for form in candidates:
        function = find(model, form.function)
        try:
            return form, [function(**call) for call in form.calls]
        except Exception as caught:
            reasons.append(f"{type(caught).__name__}: {caught}")
    return "; ".join(dict.fromkeys(reasons))[:300]


def rows_of(name: str, encoder: bool) -> Iterator[dict[str, Any]]:
    """Yield a row of the table for each modality of a model."""
    model = make(name)
    found = {kind: accepted(model, candidates) for kind, candidates in forms(model, encoder)}
    row: dict[str, Any] = {"model": name}
    try:
        vg.wrap(model, backend="tape")
        budgets = {path: budgets_for(encoder) for path, encoder in vg.encoders(model).items()}
        vg.unwrap(model)
        vg.wrap(model, budgets, backend="tape")
    except vg.SpecError as refused:
        yield row | {"modality": ", ".join(found), "found": None, "why": str(refused)[:600]}
        return
    for kind, result in found.items():
        if isinstance(result, str):
            yield row | {"modality": kind, "found": None, "why": f"no form of its inputs is known here: {result}"}
            continue
        form, expected = result
        before = {path: encoder.stats.replays.total() for path, encoder in vg.encoders(model).items()}
        worst = 0.0
        for call, output in zip(form.calls, expected, strict=True):
            find(model, form.function)(**call)
            for encoder in vg.encoders(model).values():
                encoder.poison()
            worst = max(worst, error(real(find(model, form.function)(**call), call), real(output, call)))
        used = {
            path: encoder for path, encoder in vg.encoders(model).items()
            if encoder.stats.replays.total() > before[path] or encoder.stats.eager
        }  # fmt: skip
        yield row | {
            "modality": kind,
            "found": {path: type(encoder.spec.layout).__name__ for path, encoder in used.items()},
            "replays": sum(encoder.stats.replays.total() - before[path] for path, encoder in used.items()),
            "eager": {reason: n for encoder in used.values() for reason, n in encoder.stats.eager.items()},
            "error": worst,
        }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with torch.no_grad():
        for own in rows_of(sys.argv[1], encoder=len(sys.argv) > 2):
            print(json.dumps(own), flush=True)
