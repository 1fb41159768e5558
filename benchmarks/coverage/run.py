"""Wrap one model and call it, with and without graphs."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

import varlen_graphs as vg
from benchmarks.coverage.calls import Form, direct_calls, find, forms
from benchmarks.coverage.outcomes import TOLERANCE
from benchmarks.coverage.tiny import make
from varlen_graphs.recipes.automatic.ways import SOUND
from varlen_graphs.recipes.sound.speech import ClipMask

PADDED = vg.budgets.PaddedLadder(batch=8, length=64, min_batch=8, step=4.0)
PACKED = [vg.budgets.Budget(rows, items=12, segments=rows // 4) for rows in (512, 4096)]


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


Sizes = list[dict[str, list[tuple[int, ...]]]]
"""Shapes of the tensors of each field of an output, for each item of a call that comes alone and without padding."""


def fields(output: Any) -> dict[str, list[Tensor]]:
    """The tensors of each field of an output."""
    parts = output.items() if isinstance(output, dict) else [("", output)]
    return {name: [*tensors(part)] for name, part in parts}


def alone(function: Any, call: dict[str, Any]) -> Sizes | None:
    """The shapes for each item of a call with a mask that has padding; `None` if the model takes none alone."""
    mask = next((value for name, value in call.items() if _is_mask(name, value)), None)
    if mask is None or (len(mask) == 1 and mask.all()):
        return None
    batch, length = mask.shape
    sizes = []
    for at, count in enumerate(mask.bool().sum(1).tolist()):
        one = {}
        for name, value in call.items():
            if isinstance(value, Tensor) and len(value) == batch:
                value = value[at : at + 1]
                if value.shape[1:2] == (length,):
                    value = value[:, :count]
                elif value.dim() > 2 and value.shape[-1] == length:
                    value = value[..., :count]
            one[name] = value
        try:
            own = fields(function(**one))
            sizes.append({field: [tuple(x.shape) for x in found] for field, found in own.items()})
        except Exception:  # it is too short by itself
            return None
    return sizes


def _is_mask(name: str, value: Any) -> bool:
    return name.endswith("mask") and isinstance(value, Tensor) and value.dim() == 2


def real(output: Any, call: dict[str, Any], sizes: Sizes | None) -> list[Tensor]:
    """The tensors of an output; those of a batch without what pads items, of which models may make anything.

    Of pictures in frames, and of items that the model does not take alone, those that the model itself goes on with.
    """
    framed = sizes is None and any(_is_mask(name, value) and not value.all() for name, value in call.items())
    framed |= any("mask" in name and isinstance(value, Tensor) and value.dim() > 2 for name, value in call.items())
    if framed and isinstance(output, dict) and output.get("pooler_output") is not None:
        output = output["pooler_output"]
    return [
        part for name, found in fields(output).items() for part in _real(found, [own.get(name) for own in sizes or ()])
    ]


def _real(found: list[Tensor], sizes: list[list[tuple[int, ...]] | None]) -> list[Tensor]:
    """The tensors of a field, each without what pads its items if they come alone with as many tensors."""
    if not sizes or any(own is None or len(own) != len(found) for own in sizes):
        return found
    parts = []
    for at, x in enumerate(found):
        shapes = [own[at] for own in sizes if own is not None]
        of_batch = x.dim() > 1 and len(x) == len(shapes) and all(len(own) == x.dim() for own in shapes)
        if of_batch and all(own[0] == 1 for own in shapes):
            parts += [one[tuple(map(slice, own[1:]))] for one, own in zip(x, shapes, strict=True)]
        else:
            parts.append(x)
    return parts


def budgets_for(spec: vg.BufferSpec) -> Any:
    """Few budgets that hold the calls of every form."""
    if isinstance(spec.layout, ClipMask):
        length = max(256, 64 * spec.layout.shortest)
        return vg.budgets.PaddedLadder(batch=8, length=length, min_batch=8, min_length=length // 16, step=4.0)
    if spec.layout.name == "patches":
        return vg.budgets.PaddedLadder(batch=8, length=160, min_batch=8, min_length=160)
    return [2, 8] if spec.layout.one_row else PADDED if spec.layout.padded else PACKED


class Accepted(NamedTuple):
    """A form that a model takes, its outputs, and their sizes for each item alone."""

    form: Form
    outputs: list[Any]
    sizes: list[Sizes | None]


def accepted(model: nn.Module, candidates: list[Form]) -> Accepted | str:
    """The first form that a model takes; or why it takes none."""
    reasons = []
    for form in candidates:
        function = find(model, form.function)
        try:
            outputs = [function(**call) for call in form.calls]
            again = function(**form.calls[0])
        except Exception as caught:
            reasons.append(f"{type(caught).__name__}: {caught}"[:150])
        else:
            if error(again, outputs[0]) > TOLERANCE:
                return "it does not repeat its output"
            return Accepted(form, outputs, [alone(function, call) for call in form.calls])
    return "; ".join(dict.fromkeys(reasons))[:600]


def rows_of(name: str, encoder: bool) -> Iterator[dict[str, Any]]:
    """Yield a row of the table for each modality of a model, and for each tower that none of them reaches."""
    row: dict[str, Any] = {"model": name}
    try:
        model: Any = make(name)
    except Exception as caught:
        yield row | {"modality": "", "found": None, "built": False, "why": f"{type(caught).__name__}: {caught}"[:300]}
        return
    own = model if encoder else None
    if encoder:
        model.config.use_cache = False
    try:
        vg.wrap(model, backend="tape")
    except vg.errors.SpecError as refused:
        yield row | {"modality": "", "found": None, "why": str(refused)[:2000]}
        return
    specs = {path: encoder.spec for path, encoder in vg.encoders(model).items()}
    stays = {path: why[:600] for path, why in vg.encoders(model).eager.items() if path not in vg.encoders(model).stats}
    vg.unwrap(model)
    of_one_size = any(
        s.layout.one_row and (s.row_input.dtype is not None or s.row_input.name in SOUND) for s in specs.values()
    )
    given = {} if encoder and of_one_size else dict(forms(model, own is not None))
    found = {kind: accepted(model, candidates) for kind, candidates in given.items()}
    inside = {path: model.get_submodule(path) for path in specs}
    direct = {path: accepted(inside[path], [Form("", direct_calls(inside[path], specs[path]))]) for path in specs}
    vg.wrap(model, {path: budgets_for(spec) for path, spec in specs.items()}, backend="tape")
    used: set[str] = set()
    for kind, result in found.items():
        if isinstance(result, str):
            why = f"no call of it is known here: {result}"
            yield row | {"modality": kind, "found": None, "called": False, "why": why}
        else:
            compared = compare(model, result)
            used |= {*compared["found"]}
            yield row | {"modality": kind} | compared
    for path, result in direct.items():
        if path not in used and not isinstance(result, str):
            yield row | {"modality": f"{path} itself"} | compare(model, result, path)
        elif path not in used:
            yield row | {"modality": f"{path} itself", "found": None, "why": f"no call of it is known here: {result}"}
    for path, stats in vg.encoders(model).stats.items():
        if not stats.calls and path not in direct and not path.startswith(tuple(f"{one}." for one in used)):
            why = "its first call would tell how to graph it, and none is known here"
            yield row | {"modality": f"{path} itself", "found": None, "called": False, "why": why}
    for path, reason in stays.items():
        yield row | {"modality": path, "found": None, "why": reason}


def compare(model: Any, accepted: Accepted, path: str | None = None) -> dict[str, Any]:
    """Call a wrapped model, or its tower at a path, at each layout, twice, the second time with NaN in all padding."""
    function = find(model, accepted.form.function) if path is None else model.get_submodule(path)
    before = counts(model)
    worst = 0.0
    for call, output, sizes in zip(accepted.form.calls, accepted.outputs, accepted.sizes, strict=True):
        function(**call)
        for encoder in vg.encoders(model).values():
            encoder.poison()
        worst = max(worst, error(real(function(**call), call, sizes), real(output, call, sizes)))
    encoders, used = vg.encoders(model), {}
    for path, (replays, eager) in counts(model).items():
        if (replays, eager) != before[path]:
            used[path] = replays - before[path][0], eager - before[path][1]
    how = {path: f"{encoders.how[path]}, {type(encoders[path].spec.layout).__name__}" for path in encoders}
    why = [encoders.eager.get(path, "")[:600] for path in used]
    return {
        "found": {path: how[path] for path in used if path in how},
        "replays": sum(replays for replays, _ in used.values()),
        "eager": dict(sum((eager for _, eager in used.values()), Counter[str]())),
        "error": worst,
        "why": "; ".join(filter(None, why)) if used else "the call reaches no tower that is wrapped",
    }


def counts(model: nn.Module) -> dict[str, tuple[int, Counter[str]]]:
    """How many times graphs of each tower were replayed, and its calls that ran eager, by the reason."""
    encoders = vg.encoders(model)
    own = {path: [stats] for path, stats in encoders.stats.items()}
    for path, encoder in encoders.items():
        own[path] = [part.stats for part in (encoder, *getattr(encoder, "others", ()))]
    return {
        path: (
            sum(one.replays.total() for one in stats),
            sum((Counter(one.eager) for one in stats), Counter[str]()),
        )
        for path, stats in own.items()
    }
