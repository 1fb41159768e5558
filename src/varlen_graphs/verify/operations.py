"""Find the first operation of a forward whose active rows differ between two runs."""

import linecache
import sys
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from varlen_graphs.graphs.forward import Forward
from varlen_graphs.watch.rules import draws_random_numbers
from varlen_graphs.watch.thread_modes import RunMode, run_under

MOST_BYTES = 1 << 30
"""Bytes of results of one run to keep at a time for comparison with another run."""

PACKAGE, TORCH = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent)

aten = torch.ops.aten

_UNWRITTEN = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten.resize_,
}  # fmt: skip
"""Operations whose results are uninitialized."""

Run = Callable[[], object]
Same = Callable[[Tensor, Tensor], bool]


class DifferingOperation(NamedTuple):
    """First operation whose results differ between two runs."""

    name: str  # torch's name of the operator
    line: str  # of the module's code
    module: str  # path and class of the submodule

    def __str__(self) -> str:
        return f"{self.name}\n  at {self.line}\n  in {self.module}"


def first_difference(module: nn.Module, exact: Run, one: Run, other: Run, same: Same) -> DifferingOperation | None:
    """Find the first operation whose active results differ between two runs at a budget; `one` may be `exact` instead.

    `exact` runs the items without padding and shows which entries are active: the leading ones, as many as the same
    operation returns there. Both runs are repeated for each `MOST_BYTES` of results.
    """
    without, padded = _OutlineRecorder(), _OutlineRecorder()
    without.watch(exact)
    padded.watch(other)
    blocks = SequenceMatcher(None, padded.names, without.names, autojunk=False).get_matching_blocks()
    places = {block.a + at: block.b + at for block in blocks for at in range(block.size)}
    own_places = {at: at for at in range(len(without.names))} if one == exact else places
    paths = {id(part): f"{path or 'the module'} ({type(part).__name__})" for path, part in module.named_modules()}
    begin = 0
    while begin < len(without.names):
        recorder = _ResultRecorder(own_places, without.shapes, begin)
        recorder.watch(one)
        comparer = _ResultComparer(places, recorder.results, same, paths)
        comparer.watch(other)
        if comparer.found is not None:
            return comparer.found
        begin = recorder.end
    return None


def random_draw(module: nn.Module, run: Run) -> DifferingOperation | None:
    """Find the first operation of a run that draws random numbers."""
    finder = _DrawFinder(
        {id(part): f"{path or 'the module'} ({type(part).__name__})" for path, part in module.named_modules()}
    )
    run_under(run, finder)
    return finder.found


class _DrawFinder(RunMode):
    """Finds the first operation that draws random numbers."""

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: DifferingOperation | None = None
        self._paths = paths

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.found is None and draws_random_numbers(func, args, kwargs or {}):
            self._find(str(func))
        return func(*args, **(kwargs or {}))

    def _find(self, name: str) -> None:
        self.found = DifferingOperation(name, *_where(self._paths))


class _OperationMode(RunMode):
    """Calls `seen` for each operation of a run that writes tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = -1

    def watch(self, run: Run) -> None:
        """Observe one run."""
        run_under(run, self)

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        """Handle one operation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if results and getattr(func, "overloadpacket", None) not in _UNWRITTEN:
            self._count += 1
            self.seen(self._count, str(func), results)
        return result


class _OutlineRecorder(_OperationMode):
    """Records the name and the result shapes of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes: list[list[torch.Size]] = []

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        self.names.append(name)
        self.shapes.append([result.shape for result in results])


class _ResultRecorder(_OperationMode):
    """Records the active part of results, from the operation `begin` on, up to `MOST_BYTES`."""

    def __init__(self, places: Mapping[int, int], shapes: list[list[torch.Size]], begin: int) -> None:
        super().__init__()
        self.results: dict[int, list[Tensor | None]] = {}
        self.end = len(shapes)
        self._places = places
        self._shapes = shapes
        self._begin = begin
        self._room = MOST_BYTES

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        place = self._places.get(at, -1)
        if self._begin <= place < self.end:
            parts = [_active(result, shape) for result, shape in zip(results, self._shapes[place], strict=False)]
            self.results[place] = [part if part is None else part.clone() for part in parts]
            self._room -= sum(part.nbytes for part in parts if part is not None)
            if self._room < 0:
                self.end = place + 1


class _ResultComparer(_OperationMode):
    """Compares results with recorded ones, up to the first difference."""

    def __init__(
        self, places: Mapping[int, int], recorded: dict[int, list[Tensor | None]], same: Same, paths: dict[int, str]
    ) -> None:
        super().__init__()
        self.found: DifferingOperation | None = None
        self._places = places
        self._recorded = recorded
        self._same = same
        self._paths = paths

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        if self.found is not None:
            return
        recorded = self._recorded.get(self._places.get(at, -1), [])
        for result, expected in zip(results, recorded, strict=False):
            part = None if expected is None else _active(result, expected.shape)
            if part is not None and expected is not None and not self._same(part, expected):
                self.found = DifferingOperation(name, *_where(self._paths))
                return


def _active(tensor: Tensor, shape: torch.Size) -> Tensor | None:
    """Return the leading entries of the given shape; `None` if the tensor has fewer."""
    if tensor.dim() != len(shape) or any(own < active for own, active in zip(tensor.shape, shape, strict=True)):
        return None
    return tensor[tuple([slice(size) for size in shape])]


def _where(paths: dict[int, str]) -> tuple[str, str]:
    """Return the line and the module that run the operation, outside of torch and of this package if there is one."""
    lines, module = [], ""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code is not Forward.__call__.__code__:
        file = frame.f_code.co_filename
        module = module or paths.get(id(frame.f_locals.get("self")), "")
        if not file.startswith(TORCH):
            line = linecache.getline(file, frame.f_lineno).strip()
            lines.append((file, f"{file}:{frame.f_lineno}, in {frame.f_code.co_name}: {line}"))
        frame = frame.f_back
    own = [line for file, line in lines if not file.startswith(PACKAGE)]
    recipes = [line for file, line in lines if file.startswith(f"{PACKAGE}/recipes")]
    return next(iter([*own, *recipes, *(line for _, line in lines), "an unknown line"])), module or "the module"
