"""The shares of ranks in one call."""

from collections.abc import Sequence

from varlen_graphs.layouts.arguments import LayoutArgument
from varlen_graphs.layouts.items import Layout


def join_layouts(layouts: Sequence[Layout], argument: LayoutArgument) -> Layout:
    """Join the items of several layouts into one layout."""
    items = [item for layout in layouts for item in layout.items]
    length = max(layout.length for layout in layouts)
    for at, column in enumerate(argument.columns, start=3):
        if column.function is not None and items:  # computed from all items
            values = column.parse(column.function(Layout(tuple([item[:3] for item in items]), length)), len(items))
            items = [(*item[:at], value, *item[at + 1 :]) for item, value in zip(items, values, strict=True)]
    return argument.layout(items, length)
