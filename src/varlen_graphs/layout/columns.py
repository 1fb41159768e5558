"""Extra integers an item carries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from varlen_graphs.errors import LayoutError, SpecError
from varlen_graphs.layout.items import Layout
from varlen_graphs.layout.values import INT64_MAX, as_list, quoted


@dataclass(frozen=True)
class Column:
    """An extra integer an item carries, such as a temporal id: an argument of the call, and a column of the item table.

    Attributes:
        name: The argument that brings one integer an item (a list or a tensor `[items]`).
        pad: What the items of padding have there.
        function: What gives one integer an item instead of an argument, from all items of a call: for what depends on
            them all, while a replay may see only some. The host computes it, so items that are described on the GPU are
            copied there.
        default: What items have where a call does not bring the argument, or has `None` for an item. `None`: calls must
            bring it.
        groups: Whether it tells which items belong together; see `NestedColumn`.

    Raises:
        SpecError: `pad` or `default` is no integer.
    """

    name: str
    pad: int = 0
    function: Callable[[Layout], Sequence[int]] | None = None
    default: int | None = None
    groups: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not all(isinstance(value, Integral) for value in (self.pad, 0 if self.default is None else self.default)):
            raise SpecError(f"{self!r}: expected pad to be an integer, and default an integer or None")

    def parse(self, value: Any, items: int) -> list[int]:
        """Check the values that a call brought and return them, one an item.

        Raises:
            LayoutError: Not one int64 for each item.
        """
        if value is None and self.default is not None:
            return [self.default] * items
        values = as_list(self.name, value, "one for each item")
        if self.default is not None:
            values = [self.default if value is None else value for value in values]
        sound = all(isinstance(v, Integral) and not isinstance(v, bool) and abs(int(v)) <= INT64_MAX for v in values)
        if len(values) != items or not sound:
            raise LayoutError(f"{self.name} is {quoted(values)}: expected one integer for each of the {items} items")
        return [int(value) for value in values]

    def begins(self, value: Any, items: int) -> list[int]:
        """Of values that `parse` takes, whether each item begins a group (1), or belongs to the one before (0)."""
        return [1] * items
