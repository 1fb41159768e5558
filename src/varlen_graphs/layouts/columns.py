"""Extra integers that an item carries."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from torch import Tensor

from varlen_graphs.checks.fields import check_fields
from varlen_graphs.checks.values import INT64_MAX, INTEGERS, as_list, is_dense, quoted, stacked
from varlen_graphs.errors import LayoutError, counted
from varlen_graphs.layouts.items import Layout


@dataclass(frozen=True)
class Column:
    """Extra integer per item, such as a temporal id: an argument of the call and a column of the item table.

    Attributes:
        name: Argument that brings one integer per item, as a list or a tensor `[items]`.
        pad: Value of padding items.
        function: Computes one integer per item from all items of a call, in place of an argument. Use it for values
            that depend on the whole call, because a replay may see only some of the items. It runs on the host, so
            items described on the GPU are copied there.
        default: Value of items for which the call brings no value: if the argument is missing, or an entry is `None`.
            `None`: calls must bring the argument.
        groups: True if the column defines groups of items; see `NestedColumn`.

    Raises:
        SpecError: `pad` or `default` is not an integer of 64 bits, `name` no string, or `function` no function.
    """

    name: str
    pad: int = 0
    function: Callable[[Layout], Sequence[int]] | None = None
    default: int | None = None
    groups: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def parse(self, value: Any, items: int) -> list[int]:
        """Check the values that a call brought and return them, one per item.

        Raises:
            LayoutError: `value` does not hold one int64 per item.
        """
        if value is None and self.default is not None:
            return [self.default] * items
        values = as_list(self.name, value, "one for each item")
        if self.default is not None:
            values = [self.default if value is None else value for value in values]
        sound = all(isinstance(v, Integral) and not isinstance(v, bool) and abs(int(v)) <= INT64_MAX for v in values)
        if len(values) != items or not sound:
            raise LayoutError(
                f"{self.name} is {quoted(values)}: expected one integer for each of {counted(items, 'item')}"
            )
        return [int(value) for value in values]

    def begins(self, value: Any, items: int) -> list[int]:
        """Return 1 for each item that starts a group and 0 for each that continues one; `parse` must accept `value`."""
        return [1] * items


@dataclass(frozen=True)
class NestedColumn(Column):
    """Column whose nesting defines groups of adjoining items: the items of one inner list form a group.

    Use it for items that belong together, such as the frames of a clip that differ in size. `[[-1], [-1], [2, 6, 9]]`
    are five items in three groups. An integer beside inner lists is a group of its own, so `[-1, -1, [2, 6, 9]]` means
    the same. In a flat list or tensor `[items]`, and if the argument is missing, every item is a group. A batch of
    prompts may have a list of groups each, `[[[-1], [-1]], [[2, 6, 9]]]`. Integers may be scalar tensors, as processors
    return them.

    The packer never splits a group, so a group that fits no budget runs eager as a whole. Segments may be groups
    (`per="group"`), and outputs may have entries per group (`Groups`). The host must see the nesting, so items
    described on the GPU cost one copy to the host.

    The attributes are those of a `Column`, and the result of `function` may be nested.
    """

    groups = True

    def parse(self, value: Any, items: int) -> list[int]:
        """Check the values that a call brought and return them, one per item; a group must have items."""
        flat = None if value is None else [entry for group in self._groups(value) for entry in group]
        return super().parse(flat if flat is None else self._without_tensors(flat), items)

    def begins(self, value: Any, items: int) -> list[int]:
        """Return 1 for each item that starts a group and 0 for each that continues one; `parse` must accept `value`."""
        if value is None:
            return super().begins(value, items)
        return [int(at == 0) for group in self._groups(value) for at in range(len(group))]

    def nested(self, value: Any, items: int) -> list[list[int]]:
        """Check the values that a call brought and return them, one list per group."""
        groups: list[list[int]] = []
        for number, begin in zip(self.parse(value, items), self.begins(value, items), strict=True):
            groups += [[]] * begin
            groups[-1] = [*groups[-1], number]
        return groups

    def _groups(self, value: Any) -> list[list[Any]]:
        """Return the groups, with the values as they came."""
        if not isinstance(value, list | tuple) or not value:
            value = as_list(self.name, value, "one for each item, or a list of them for each group")
        if all(_is_list(entry) and all(map(_is_list, entry)) for entry in value) and any(value):
            value = [group for prompt in value for group in prompt]
        groups = [[*group] if _is_list(group) else [group] for group in map(_plain, value)]
        for index, group in enumerate(groups):
            if not group:
                raise LayoutError(f"{self.name}[{index}] is empty: expected at least one item in every group; drop it")
        return groups

    def _without_tensors(self, flat: list[Any]) -> list[Any]:
        """Return values with numbers in place of scalar tensors: integers on a GPU cost one copy in all."""
        integers = [entry for entry in flat if _is_scalar(entry) and entry.dtype in INTEGERS]
        numbers = iter(stacked(self.name, integers).tolist() if integers else ())
        return [_number(entry, numbers) if _is_scalar(entry) else entry for entry in flat]


def _plain(entry: Any) -> Any:
    """Return a tensor or array of a group as a list, and anything else, scalar tensors too, as it is."""
    if isinstance(entry, Tensor):
        return entry.tolist() if entry.dim() and is_dense(entry) else entry
    return entry.tolist() if hasattr(entry, "tolist") else entry


def _is_list(entry: Any) -> bool:
    return isinstance(entry, list | tuple)


def _is_scalar(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dim() == 0 and is_dense(entry)


def _number(scalar: Tensor, numbers: Iterator[int]) -> Any:
    return next(numbers) if scalar.dtype in INTEGERS else scalar.item()
