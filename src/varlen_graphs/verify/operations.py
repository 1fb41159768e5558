"""Which operation it is: the first one of a forward whose active rows differ between two runs."""

import linecache
import sys
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from varlen_graphs.graphs.forward import Forward

MOST_BYTES = 1 << 30
"""How much of what a run computes is kept at a time, to be compared with another run."""

PACKAGE, TORCH = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent)

aten = torch.ops.aten

_UNWRITTEN = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten.resize_,
}  # fmt: skip
"""Operations whose results hold anything."""

Run = Callable[[], object]
Same = Callable[[Tensor, Tensor], bool]


class Operation(NamedTuple):
    """An operation of a run.

    Attributes:
        name: What torch calls it.
        line: The line of the module's code that runs it.
        module: The path and the class of the submodule that runs it.
    """

    name: str
    line: str
    module: str

    def __str__(self) -> str:
        return f"{self.name}\n  at {self.line}\n  in {self.module}"


def first_difference(module: nn.Module, exact: Run, one: Run, other: Run, same: Same) -> Operation | None:
    """The first operation whose results differ between two runs, entries of padding aside.

    Which entries are active is told by a run without padding: as many as the same operation gives there, in front.
    Operations that it does not run are passed over. Each run is repeated for every gibibyte of results.

    Args:
        module: What runs, for the names of its parts.
        exact: Runs the items without padding.
        one: Runs them at a budget; or `exact` itself.
        other: Runs them at a budget.
        same: Whether two results are the same.
    """
    without, padded = _Outline(), _Outline()
    without.watch(exact)
    padded.watch(other)
    blocks = SequenceMatcher(None, padded.names, without.names, autojunk=False).get_matching_blocks()
    places = {block.a + at: block.b + at for block in blocks for at in range(block.size)}
    own_places = {at: at for at in range(len(without.names))} if one == exact else places
    paths = {id(part): f"{path or 'the module'} ({type(part).__name__})" for path, part in module.named_modules()}
    begin = 0
    while begin < len(without.names):
        kept = _Kept(own_places, without.shapes, begin)
        kept.watch(one)
        compared = _Compared(places, kept.results, same, paths)
        compared.watch(other)
        if compared.found is not None:
            return compared.found
        begin = kept.end
    return None


class _Operations(TorchDispatchMode):
    """Sees the operations of a run that write tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = -1

    def watch(self, run: Run) -> None:
        """See one run."""
        with torch.compiler.set_stance("force_eager"), self:
            run()

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        """Called with each operation that there is."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if results and getattr(func, "overloadpacket", None) not in _UNWRITTEN:
            self._count += 1
            self.seen(self._count, str(func), results)
        return result


class _Outline(_Operations):
    """Notes the names of operations, and the shapes of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes: list[list[torch.Size]] = []

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        self.names.append(name)
        self.shapes.append([result.shape for result in results])


class _Kept(_Operations):
    """Keeps the active part of what operations give, from one on, as long as there is room."""

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


class _Compared(_Operations):
    """Compares what operations give with what was kept, up to the first difference."""

    def __init__(
        self, places: Mapping[int, int], kept: dict[int, list[Tensor | None]], same: Same, paths: dict[int, str]
    ) -> None:
        super().__init__()
        self.found: Operation | None = None
        self._places = places
        self._kept = kept
        self._same = same
        self._paths = paths

    def seen(self, at: int, name: str, results: list[Tensor]) -> None:
        if self.found is not None:
            return
        for result, kept in zip(results, self._kept.get(self._places.get(at, -1), []), strict=False):
            part = None if kept is None else _active(result, kept.shape)
            if part is not None and kept is not None and not self._same(part, kept):
                self.found = Operation(name, *_where(self._paths))
                return


def _active(tensor: Tensor, shape: torch.Size) -> Tensor | None:
    """The entries in front, of a result that has as many without padding; `None` if it has fewer."""
    if tensor.dim() != len(shape) or any(own < active for own, active in zip(tensor.shape, shape, strict=True)):
        return None
    return tensor[tuple([slice(size) for size in shape])]


def _where(paths: dict[int, str]) -> tuple[str, str]:
    """The line that runs an operation, and the module: outside of torch and of this package, if there is one."""
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
