"""Inspection of a tower by running it on a few small layouts: the helpers it calls, the extents of its outputs."""

import dataclasses
import dis
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from varlen_graphs.errors import SpecError
from varlen_graphs.inputs.rows import Rows as InputRows
from varlen_graphs.layouts.item_slice import ItemSlice
from varlen_graphs.layouts.items import Layout
from varlen_graphs.outputs.declared import Declared, Fields
from varlen_graphs.outputs.entries import Extent, Items, Rows
from varlen_graphs.outputs.parts import CONSTANTS
from varlen_graphs.recipes.automatic.precomputed import CountedExtent, HelperCall
from varlen_graphs.recipes.probe import RUN_ERRORS, TowerProbe
from varlen_graphs.torch_dispatch.profile import profiled

LAYOUTS = ("grid_thw", "image_grid_thw", "feature_lens")
"""Arguments of towers that describe items: grids, and lengths of audio."""

HELPER_MODULES = ("transformers.vision_utils", "transformers.utils.generic")
"""Modules of the helpers that many towers share; other helpers are in the file of their tower."""


def never_reads(forward: Callable[..., Any], name: str) -> bool:
    """Return True if the code of a forward has no use for an argument. A run would show one path through it alone."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False
    return not any(one.argval == name for one in dis.get_instructions(code) if one.opname.startswith("LOAD_"))


class PackedProbe(TowerProbe):
    """A tower of packed rows, and the names of the arguments that hold the rows and describe the items."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__(tower)
        parameters = self.takes
        self.rows = next(iter(parameters))
        layout = next((name for name in LAYOUTS if name in parameters), None)
        if layout is None:
            raise SpecError(f"its forward takes {list(parameters)}: expected one of {LAYOUTS}")
        self.layout = layout
        self.is_audio = layout == "feature_lens"
        needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        others = [name for name in needed if name not in (self.rows, layout)]
        if others:
            raise SpecError(f"its forward requires {others} too, which does not follow from {layout}")

    def example(self, packed: InputRows, layout: Layout) -> Tensor:
        """Return random rows for a layout, the same in each call."""
        assert packed.shape is not None  # noqa: S101 - made by `forms`
        weight = next(p for p in self.tower.parameters() if p.is_floating_point())
        shape = packed.argument_shape((layout.total,), packed.shape)
        rows = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
        return rows.to(weight.device, weight.dtype if weight.dtype.itemsize > 1 else None)

    def describe(self, layout: Layout) -> Tensor:
        """Return the layout argument of a call."""
        items = torch.tensor(layout.items, device=next(self.tower.parameters()).device)
        return items[:, 2] if self.is_audio else items

    def call(self, packed: InputRows, layout: Layout) -> dict[str, Tensor]:
        """Return a call of random rows."""
        return {self.rows: self.example(packed, layout), self.layout: self.describe(layout)}

    def run_items(self, packed: InputRows, layout: Layout, **asked: Any) -> Any:
        """Return the tower's own output for random rows."""
        try:
            return self.run({**self.call(packed, layout), **asked})
        except RUN_ERRORS as error:
            form = packed.describe(("rows",), packed.shape)
            raise SpecError(
                f"for {self.layout}={self.describe(layout).tolist()} and {self.rows} {form} it raises {error!r}"
            ) from error

    def ignored(self) -> list[str]:
        """Return the names of lengths and masks that the tower takes and never uses."""
        names = [name for name in self.takes if name.endswith(("_lens", "_mask"))]
        return [name for name in names if name != self.layout and never_reads(self.forward, name)]

    def forms(self) -> Iterator[InputRows]:
        """Yield possible shapes of rows: those that the first convolution and the first linear layer accept."""
        if self.is_audio:
            config: Any = self.tower.config
            yield InputRows(self.rows, shape=(config.num_mel_bins,), rows_dim=1)
            return
        for kind in (nn.Conv2d | nn.Conv3d, nn.Linear):
            weights = [m.weight for m in self.tower.modules() if isinstance(m, kind) and getattr(m, "groups", 1) == 1]
            for weight in weights[:1]:
                for shape in dict.fromkeys([(weight[0].numel(),), tuple(weight.shape[1:])]):
                    yield InputRows(self.rows, shape=shape)
                    yield InputRows(self.rows, shape=(1, *shape), rows_dim=1)

    def inspect(self, layout: Layout) -> tuple[InputRows, list[HelperCall]]:
        """Return the form of the rows and the helper calls of a run on this layout."""
        failures = []
        for packed in self.forms():
            calls: list[HelperCall] = []
            try:
                with _watching(self.tower, calls):
                    self.run_items(packed, layout)
            except SpecError as error:
                failures.append((packed.describe(("rows",), packed.shape), error))
            else:
                return packed, calls
        forms = ", ".join(form for form, _ in failures)
        why = f"; {failures[0][1]}" if failures else ""
        raise SpecError(f"it accepts {self.rows} in none of the forms {forms or 'known'}{why}")


def raised_in(error: BaseException | None, calls: Sequence[HelperCall]) -> HelperCall | None:
    """Return the first of these helper calls whose helper raised an error or its cause, or `None`."""
    codes = set()
    while error is not None:
        codes |= {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        error = error.__cause__ or error.__context__
    return next((call for call in calls if call.code in codes), None)


@contextmanager
def _watching(module: nn.Module, calls: list[HelperCall]) -> Iterator[None]:
    """Append the helper calls that this thread makes inside the block to `calls`, once per settings."""
    # A helper is a function of transformers, or of a file of the tower, that has a dict argument `kwargs`.
    own = {cls.__module__ for part in module.modules() for cls in type(part).__mro__}
    own = {name for name in own if name.partition(".")[0] not in ("builtins", "torch")}
    pending: dict[FrameType, tuple[dict[str, Any], str]] = {}
    seen = set()

    def profile(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "return" and frame in pending:
            calls.append(HelperCall(code, *pending.pop(frame), result))
        if event != "call" or _module_of(frame) not in {*own, *HELPER_MODULES}:
            return
        names = code.co_varnames[: code.co_argcount]
        if "kwargs" not in names or not isinstance(frame.f_locals["kwargs"], dict):
            return
        settings = {name: frame.f_locals[name] for name in names if name != "kwargs"}
        key = code.co_name, tuple((n, v) for n, v in settings.items() if isinstance(v, int | float | str | None))
        if key not in seen:
            seen.add(key)
            pending[frame] = settings, _line(frame.f_back, own)

    with profiled(profile):
        yield


def _module_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _line(frame: FrameType | None, own: set[str]) -> str:
    """Return the line of the tower that a frame runs or was called from."""
    while frame is not None and _module_of(frame) not in own:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "a line"


def declare(
    outputs: Sequence[Any], layouts: Sequence[Layout], known: Sequence[CountedExtent]
) -> tuple[Declared, list[str]]:
    """Declare outputs by the way their sizes follow from layouts; `known` are extents to try beside `Rows` and `Items`.

    Also returns the fields whose sizes follow from none of the extents.
    """
    fields = [fields_of(output) or {"": output} for output in outputs]
    declared = {name: _declare([one[name] for one in fields], layouts, known) for name in fields[0]}
    found = {name: extent for name, extent in declared.items() if extent is not None}
    if not any(isinstance(leaf, Tensor) for name in found for leaf in tree_leaves(fields[0][name])):
        entries = zip(*outputs, strict=True) if isinstance(outputs[0], list | tuple) else ()
        without = [at for at, parts in enumerate(entries) if _declare(parts, layouts, known) is None]
        which = f"its outputs {without} have no" if 0 < len(without) < len(outputs[0]) else "none of its outputs has an"
        raise SpecError(f"{which} entry for each row or item")
    unknown = [name for name in declared if name not in found]
    return found[""] if "" in found else Fields(**found), unknown


def _declare(parts: Sequence[Any], layouts: Sequence[Layout], known: Sequence[CountedExtent]) -> Declared | None:
    """Return the declaration of parts of outputs; `None` if their sizes follow from no extent."""
    first = parts[0]
    if isinstance(first, Tensor):
        return _extent(parts, layouts, known)
    if isinstance(first, CONSTANTS):
        return Rows() if all(type(part) is type(first) and part == first for part in parts) else None
    entries: dict[Any, Declared | None]
    if fields_of(first) is not None:
        each = [fields_of(part) or {} for part in parts]
        entries = {name: _declare([one[name] for one in each], layouts, known) for name in each[0]}
    elif isinstance(first, list | tuple):
        entries = {at: _declare(inner, layouts, known) for at, inner in enumerate(zip(*parts, strict=True))}
    else:
        return None
    found = {name: entry for name, entry in entries.items() if entry is not None}
    if len(found) < len(entries):
        return None
    return found if fields_of(first) is not None else [*found.values()]


def fields_of(output: Any) -> dict[Any, Any] | None:
    """Return the fields of a mapping or a dataclass by name; `None` if an output is neither."""
    if isinstance(output, Mapping):
        return dict(output.items())
    if dataclasses.is_dataclass(output) and not isinstance(output, tuple | list):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return None


def _extent(tensors: Sequence[Tensor], layouts: Sequence[Layout], known: Sequence[CountedExtent]) -> Extent | None:
    first = layouts[0]
    sizes = [*enumerate(tensors[0].shape)]
    for dim, size in sorted(sizes, key=lambda one: all(tensor.shape[one[0]] == one[1] for tensor in tensors)):
        tried: list[Extent] = [dataclasses.replace(extent, rows_dim=dim) for extent in known]
        tried += [Rows(max(1, first.total // max(1, size)), dim), Items(max(1, size // len(first)), dim)]
        for extent in tried:
            if all(t.shape[dim] == extent.size(ItemSlice.of(at))[0] for t, at in zip(tensors, layouts, strict=True)):
                return extent
    return None
