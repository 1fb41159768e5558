"""The picture of the demo: bars for each call."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 960, 260, 120, 76, 52, 18
"""Pixels of the picture, of its margins, of a row and of a bar."""

INK, PALE, STRONG = (32, 33, 36), (176, 182, 191), (26, 115, 232)
"""Colours of the text and of bars."""

LEAST = 1e-9
"""Error at which the axis of errors begins."""


class Bars(NamedTuple):
    """The bars of one call.

    Attributes:
        name: What stands before them.
        values: Their values, in the order of the legend.
        label: What stands after the last one.
    """

    name: str
    values: Sequence[float]
    label: str


def draw_times(path: Path, title: str, calls: Sequence[Bars]) -> None:
    """Write a picture of milliseconds, eager and graphed, of each call."""
    longest = max(max(call.values) for call in calls)
    _draw(path, title, ("eager, ms", "graphed, ms"), calls, lambda ms: ms / longest, "{:.2f}".format)


def draw_errors(path: Path, title: str, calls: Sequence[Bars], allowed: float) -> None:
    """Write a picture of the error of each call on a logarithmic axis that ends at what is allowed."""
    span = math.log(allowed / LEAST)
    legend = (f"relative error of graphed outputs; the full width is {allowed:.0e}, which is allowed",)
    _draw(path, title, legend, calls, lambda error: math.log(max(error, LEAST) / LEAST) / span, "{:.1e}".format)


def _draw(
    path: Path,
    title: str,
    legend: Sequence[str],
    calls: Sequence[Bars],
    share: Callable[[float], float],
    number: Callable[[float], str],
) -> None:
    """Write bars whose lengths are shares of the width."""
    from PIL import Image, ImageDraw, ImageFont

    colours = (PALE, STRONG)[-len(legend) :]
    picture = Image.new("RGB", (WIDTH, TOP + ROW * len(calls) + 12), "white")
    draw, font, large = ImageDraw.Draw(picture), ImageFont.load_default(14), ImageFont.load_default(18)
    draw.text((16, 12), title, INK, large)
    at = 16.0
    for text, colour in zip(legend, colours, strict=True):
        draw.rectangle((at, 46, at + 12, 58), colour)
        draw.text((at + 18, 44), text, INK, font)
        at += 40 + draw.textlength(text, font)
    for row, call in enumerate(calls):
        y = TOP + ROW * row
        draw.text((16, y + (BAR + 2) * len(call.values) // 2 - 9), call.name, INK, font)
        for index, (value, colour) in enumerate(zip(call.values, colours, strict=True)):
            top, end = y + index * (BAR + 2), LEFT + max(1.0, min(1.0, share(value)) * (WIDTH - LEFT - RIGHT))
            draw.rectangle((LEFT, top, end, top + BAR), colour)
            last = f"  {call.label}" if index + 1 == len(call.values) else ""
            draw.text((end + 6, top + 1), f"{number(value)}{last}", INK, font)
    picture.save(path)
