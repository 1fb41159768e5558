"""Find the first operation of a forward whose active rows differ between two runs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from varlen_graphs.graphs.forward import Forward
from varlen_graphs.torch_dispatch.lines import UNKNOWN_LINE, user_lines
from varlen_graphs.torch_dispatch.rules import draws_random_numbers
from varlen_graphs.torch_dispatch.thread_modes import RunMode, run_under

MOST_BYTES = 1 << 30
"""Bytes of results of one run to keep at a time for comparison with another run."""

PACKAGE = str(Path(__file__).parent.parent)

aten = torch.ops.aten

_UNWRITTEN = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten.resize_,
}  # fmt: skip
"""Operations whose results are uninitialized."""

Run = Callable[[], object]
Same = Callable[[Tensor, Tensor], bool]

Batches = tuple[tuple[int, int], tuple[int, int]]
"""The items and the length of a padded batch, and those of the budget."""


class DifferingOperation(NamedTuple):
    """First operation whose results differ between two runs."""

    name: str  # torch's name of the operator
    line: str  # of the module's code
    module: str  # path and class of the submodule

    def __str__(self) -> str:
        return f"{self.name}\n  at {self.line}\n  in {self.module}"


def first_difference(
    module: nn.Module,
    exact: Run,
    one: Run,
    other: Run,
    same: Same,
    batches: Batches | None = None,
    views: bool = False,
) -> DifferingOperation | None:
    """Find the first operation whose active results differ between two runs at a budget; `one` may be `exact` instead.

    `exact` runs the items without padding and shows which entries are active: the leading ones, as many as the same
    operation returns there. Both runs are repeated for each `MOST_BYTES` of results. With `batches`, an operation may
    have made one dimension of both. With `views`, operations count that return some, even of memory nobody wrote.
    """
    without, padded = _OutlineRecorder(), _OutlineRecorder()
    without.watch(exact, views)
    padded.watch(other, views)
    blocks = SequenceMatcher(None, padded.names, without.names, autojunk=False).get_matching_blocks()
    places = {block.a + at: block.b + at for block in blocks for at in range(block.size)}
    own_places = {at: at for at in range(len(without.names))} if one == exact else places
    paths = paths_of(module)
    begin = 0
    while begin < len(without.names):
        recorder = _ResultRecorder(own_places, without.shapes, begin, batches)
        recorder.watch(one, views)
        comparer = _ResultComparer(places, without.shapes, recorder.results, same, paths, batches)
        comparer.watch(other, views)
        if comparer.found is not None:
            return comparer.found
        begin = recorder.end
    return None


def random_draw(module: nn.Module, run: Run) -> DifferingOperation | None:
    """Find the first operation of a run that draws random numbers."""
    finder = _DrawFinder(paths_of(module))
    run_under(run, finder)
    return finder.found


class _DrawFinder(RunMode):
    """Finds the first operation that draws random numbers."""

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()
        self.found: DifferingOperation | None = None
        self._paths = paths

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        if self.found is None and draws_random_numbers(func, args, kwargs):
            self._find(str(func))
        return func(*args, **kwargs)

    def _find(self, name: str) -> None:
        self.found = DifferingOperation(name, *where(self._paths))


class OperationMode(RunMode):
    """Calls `seen` for each operation of a run that writes tensors; for those that return views if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self._count = -1

    def watch(self, run: Run, views: bool = False) -> Any:
        """Observe one run, and return its output."""
        self._views = views
        return run_under(run, self)

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        """Handle one operation."""

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        written = getattr(func, "overloadpacket", None) not in _UNWRITTEN
        if results and written and (self._views or not _returns_view(func)):
            self._count += 1
            self.seen(self._count, str(func), results)
        return result


def _returns_view(operator: Any) -> bool:
    """Return True if an operator returns a view of an argument, and nothing else."""
    returns = operator._schema.returns if isinstance(operator, torch._ops.OpOverload) else ()
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


class _OutlineRecorder(OperationMode):
    """Records the name and the result shapes of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes: list[list[torch.Size]] = []

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        self.names.append(name)
        self.shapes.append([result.shape for result in results])


class _ResultRecorder(OperationMode):
    """Records the active part of results, from the operation `begin` on, up to `MOST_BYTES`."""

    def __init__(
        self, places: Mapping[int, int], shapes: list[list[torch.Size]], begin: int, batches: Batches | None
    ) -> None:
        super().__init__()
        self.results: dict[int, list[list[Tensor]]] = {}
        self.end = len(shapes)
        self._places = places
        self._shapes = shapes
        self._begin = begin
        self._batches = batches
        self._room = MOST_BYTES

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        place = self._places.get(at, -1)
        if self._begin <= place < self.end:
            shapes = self._shapes[place]
            parts = [_active(result, shape, self._batches) for result, shape in zip(results, shapes, strict=False)]
            self.results[place] = [[one.clone() for one in readings] for readings in parts]
            self._room -= sum(one.nbytes for readings in parts for one in readings)
            if self._room < 0:
                self.end = place + 1


class _ResultComparer(OperationMode):
    """Compares results with recorded ones, up to the first difference."""

    def __init__(
        self,
        places: Mapping[int, int],
        shapes: list[list[torch.Size]],
        recorded: dict[int, list[list[Tensor]]],
        same: Same,
        paths: dict[int, str],
        batches: Batches | None,
    ) -> None:
        super().__init__()
        self.found: DifferingOperation | None = None
        self._places = places
        self._shapes = shapes
        self._recorded = recorded
        self._same = same
        self._paths = paths
        self._batches = batches

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        place = self._places.get(at, -1)
        if self.found is not None or place not in self._recorded:
            return
        for result, shape, recorded in zip(results, self._shapes[place], self._recorded[place], strict=False):
            parts = _active(result, shape, self._batches)
            expected = recorded if len(recorded) == len(parts) else recorded * len(parts)  # a run without padding
            if parts and recorded and not any(map(self._same, parts, expected)):
                self.found = DifferingOperation(name, *where(self._paths))
                return


def _active(tensor: Tensor, shape: torch.Size, batches: Batches | None) -> list[Tensor]:
    """Return what the active entries, of the given shape, may be, none if the tensor has fewer.

    They are the leading ones, or if one dimension is made of both of a padded batch, the leading ones of these.
    """
    if tensor.dim() != len(shape):
        return []
    found = [_leading(tensor, shape)]
    (items, length), (most_items, longest) = batches or ((1, 1), (1, 1))
    for dim, (came, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        each = size // (items * length)
        if came != size and size == each * items * length and came == each * most_items * longest:
            for own, whole in (((items, length), (most_items, longest)), ((length, items), (longest, most_items))):
                apart = _leading(tensor.unflatten(dim, (*whole, each)), [*shape[:dim], *own, each, *shape[dim + 1 :]])
                found.append(None if apart is None else apart.flatten(dim, dim + 2))
    return [one for one in found if one is not None]


def _leading(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return the leading entries of the given shape; `None` if the tensor has fewer."""
    if any(own < active for own, active in zip(tensor.shape, shape, strict=True)):
        return None
    return tensor[tuple([slice(size) for size in shape])]


def where(paths: Mapping[int, str]) -> tuple[str, str]:
    """Return the line and the module that run the operation, outside of torch and of this package if there is one."""
    lines = [*user_lines()]
    own = [line for line in lines if not line.file.startswith(PACKAGE)]
    recipes = [line for line in lines if line.file.startswith(f"{PACKAGE}/recipes")]
    module, frame = "", sys._getframe(1)
    while not module and frame is not None and frame.f_code is not Forward.__call__.__code__:
        module = paths.get(id(frame.f_locals.get("self")), "")
        frame = frame.f_back  # type: ignore[assignment]
    return str(next(iter([*own, *recipes, *lines, UNKNOWN_LINE]))), module or "the module"


def paths_of(module: nn.Module) -> dict[int, str]:
    """Return the path and class of each part of a module, by its id."""
    return {id(part): f"{path or 'the module'} ({type(part).__name__})" for path, part in module.named_modules()}
