"""Calls with other layouts than those of the examples, because examples may coincide."""

from collections.abc import Iterator, Mapping
from itertools import chain
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varlen_graphs.doctor.example_call import ExampleCall, items_in

REVERSED = "its items in reverse order"


class Probe(NamedTuple):
    """A call made of an example, and the difference in words."""

    difference: str
    call: ExampleCall


def other_layouts(example: ExampleCall) -> Iterator[Probe]:
    """Yield calls with the rows of an example and other items: in another order and form, and others in number.

    The items are described by one argument, a tensor or a list of integers; or each has a tensor of its own, in a list;
    or the call is a padded batch, whose other tensors have one entry an item. Nothing else may follow from the items.
    """
    arguments = example.arguments()
    name = _rows_argument(arguments)
    if name is None:
        return
    rows, others = arguments.pop(name), arguments
    tables = {other: table for other, value in others.items() if (table := items_in(value)) is not None}
    described = {other for other in others if other in tables or isinstance(others[other], Tensor)}
    if any(type(leaf) in (int, float) for leaf in _leaves(value for key, value in others.items() if key not in tables)):
        return
    if isinstance(rows, list | tuple):
        yield from _lists(example, name, rows, {other: others[other] for other in described})
    elif len(described) == 1 and described == tables.keys():
        ((other, table),) = tables.items()
        for items in _other_items(table, rows):
            if items.shape != table.shape or not torch.equal(items, table):
                argument = f"argument {other}" if other.isdecimal() else other
                difference = shorten(f"{argument} {items.tolist()}", 100, placeholder=" ...")
                yield Probe(difference, example.replaced({other: _alike(others[other], items)}))
    elif described and _is_batch(rows, [others[other] for other in described]):
        yield Probe(REVERSED, example.replaced({other: _reversed(others[other]) for other in described}))


def _rows_argument(arguments: Mapping[str, Any]) -> str | None:
    """Return the name of the argument with the largest tensor: that tensor, or a list of tensors."""
    tensors = {
        name: leaves
        for name, value in arguments.items()
        if (leaves := [leaf for leaf in _leaves([value]) if isinstance(leaf, Tensor) and not leaf.is_nested])
    }
    name = max(tensors, key=lambda own: max(tensor.numel() for tensor in tensors[own]), default=None)
    if name is None:
        return None
    value = arguments[name]
    return name if isinstance(value, Tensor) or (_is_list_of_tensors(value)) else None


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, Tensor) for entry in value)


def _leaves(values: Any) -> Iterator[Any]:
    return chain.from_iterable(map(torch.utils._pytree.tree_leaves, values))


def _alike(value: Any, items: Tensor) -> Any:
    """Return items in the form in which an argument describes them."""
    if isinstance(value, Tensor):
        return items
    entries = [type(value[0])(entry) for entry in items.tolist()]
    return type(value)(entries)


def _other_items(items: Tensor, rows: Tensor) -> Iterator[Tensor]:
    if items.dim() == 2 and items.shape[1] == 3:
        yield items.flip(0)[:, [0, 2, 1]].contiguous()
        yield _frames(items)
        yield from _halved(items)
    elif items.dim() == 2 and items.shape[1] == 2 and rows.dim() >= 4 and len(rows) == len(items):
        yield from _sizes(items, rows)
    elif items.dim() == 2 and items.shape[1] == 2:
        yield items.flip(0, 1)
        yield from _halved(items)
    elif items.dim() == 1:
        yield from _lengths(items, rows)


def _frames(grid: Tensor) -> Tensor:
    """Return a grid `(t, h, w)` with each frame by itself."""
    frames = grid.repeat_interleave(grid[:, 0].clamp(min=0), 0)
    frames[:, 0] = 1
    return frames


def _halved(grid: Tensor) -> Iterator[Tensor]:
    """Yield a grid whose largest item is cut in two; if several are as large, also with all of them cut."""
    areas = grid.prod(1)
    largest = (areas == areas.max()) & (grid[:, -2] % 2 == 0)
    for cut in _first_and_all(largest):
        halved = grid.clone()
        halved[cut, -2] //= 2
        yield halved.repeat_interleave(cut + 1, 0)


def _first_and_all(chosen: Tensor) -> Iterator[Tensor]:
    """Yield the first of the chosen items, and all of them if they are several."""
    first = chosen & (chosen.cumsum(0) == 1)
    yield first
    if not torch.equal(first, chosen):
        yield chosen


def _sizes(sizes: Tensor, images: Tensor) -> Iterator[Tensor]:
    """Yield sizes of images that are padded to one size: in reverse order, turned, and one of half the height."""
    yield sizes.flip(0)
    if bool((sizes.amax(0).flip(0).cpu() <= torch.tensor(images.shape[-2:], device="cpu")).all()):
        yield sizes.flip(1)
    yield _smaller(sizes)


def _smaller(sizes: Tensor) -> Tensor:
    """Return sizes with half of the first height: what comes later moves."""
    smaller = sizes.clone()
    smaller[0, 0] //= 2
    return smaller


def _lengths(lengths: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Yield lengths, or their sums from 0 on, of as many rows: in reverse order, and cut in two."""
    if int(lengths.sum()) in rows.shape and int(lengths.min()) >= 0:
        yield lengths.flip(0)
        yield from _cut(lengths)
    elif lengths[0] == 0 and int(lengths[-1]) in rows.shape and bool((lengths.diff() >= 0).all()):
        for other in chain([lengths.diff().flip(0)], _cut(lengths.diff())):
            yield torch.cat([lengths[:1], other.cumsum(0).to(lengths.dtype)])


def _cut(lengths: Tensor) -> Iterator[Tensor]:
    """Yield lengths of which the largest one is cut in two; if several are as large, also with all of them cut."""
    if len(lengths):
        for cut in _first_and_all((lengths == lengths.max()) & (lengths > 1)):
            halves = torch.stack([lengths // 2 * cut, lengths - lengths // 2 * cut], dim=1)
            yield halves[torch.stack([cut, torch.ones_like(cut)], dim=1)]


def _is_batch(rows: Tensor, others: list[Any]) -> bool:
    """Return True if rows are padded items, and all other arguments have an entry for each."""
    padded = rows.dim() >= 3 or (rows.dim() == 2 and not rows.is_floating_point())
    return padded and len(rows) > 1 and all(_length(other) == len(rows) for other in others)


def _length(value: Any) -> int:
    return -1 if isinstance(value, Tensor) and not value.dim() else len(value)


def _reversed(value: Any) -> Any:
    return value.flip(0) if isinstance(value, Tensor) else value[::-1]


def _lists(example: ExampleCall, name: str, rows: Any, described: dict[str, Any]) -> Iterator[Probe]:
    """Yield calls of a list of tensors, one an item: reversed, without the last, turned, and with a smaller one."""
    if any(_length(value) != len(rows) for value in described.values()):
        return
    by_item = {name: rows, **described}
    if len(rows) > 1:
        yield Probe(REVERSED, example.replaced({key: _reversed(value) for key, value in by_item.items()}))
        yield Probe("its last item left out", example.replaced({key: value[:-1] for key, value in by_item.items()}))
    tables = {other: table for other, value in described.items() if (table := items_in(value)) is not None}
    of_sizes = tables.keys() == described.keys() and all(table.shape[1:] == (2,) for table in tables.values())
    if not of_sizes or any(image.dim() < 3 for image in rows):
        return
    turned = [image.transpose(-1, -2).contiguous() for image in rows]
    smaller = [rows[0][..., : rows[0].shape[-2] // 2, :].contiguous(), *rows[1:]]
    for difference, images, sizes in (
        ("its images turned", turned, {other: table.flip(1) for other, table in tables.items()}),
        ("half of its first image", smaller, {other: _smaller(table) for other, table in tables.items()}),
    ):
        of_items = {other: _alike(described[other], table) for other, table in sizes.items()}
        yield Probe(difference, example.replaced({name: type(rows)(images), **of_items}))
