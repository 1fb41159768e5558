"""What the benchmarks encode: single sizes, and seeded traces in which no layout comes twice.

Sizes are in patches of 16 pixels, sides a multiple of two, as the processor of Qwen3-VL makes them.
"""

import math
import random
from collections.abc import Callable

PATCH = 16
MERGE = 2

Item = tuple[int, int, int]
"""`(t, h, w)` in patches."""

Layout = tuple[Item, ...]
"""The items of one call."""


def image(side: int) -> Item:
    """A square image of so many pixels a side."""
    return 1, side // PATCH, side // PATCH


SINGLES: dict[str, Layout] = {
    "224x224": (image(224),),
    "448x448": (image(448),),
    "672x672": (image(672),),
    "896x896": (image(896),),
    "1344x1344": (image(1344),),
    "4 of 448x448": (image(448),) * 4,
    "4 frames of 224x224": ((4, 14, 14),),
}
"""One layout each, the same at every call."""


def _frame(dice: random.Random, smallest: int, largest: int) -> tuple[int, int]:
    """Height and width in patches: the area log-uniform between two squares, the aspect between 1:2 and 2:1."""
    while True:
        side = math.exp(dice.uniform(math.log(smallest), math.log(largest)))
        aspect = 2 ** dice.uniform(-0.5, 0.5)  # of one side to the root of the area, so 1:2 to 2:1 of both sides
        step = PATCH * MERGE
        h, w = (round(pixels / step) * MERGE for pixels in (side * aspect, side / aspect))
        if (smallest // PATCH) ** 2 <= h * w <= (largest // PATCH) ** 2 and max(h, w) <= 2 * min(h, w):
            return h, w  # rounding left it within the bounds


def _mix1(dice: random.Random) -> Layout:
    return ((1, *_frame(dice, 224, 1344)),)


def _mix4(dice: random.Random) -> Layout:
    return tuple((1, *_frame(dice, 224, 1344)) for _ in range(dice.randint(1, 6)))


def _video(dice: random.Random) -> Layout:
    return ((dice.randint(4, 16), *_frame(dice, 224, 448)),)


def _eight(dice: random.Random) -> Layout:
    return tuple((1, *_frame(dice, 224, 448)) for _ in range(8))


def _burst(dice: random.Random) -> Layout:
    return tuple((1, *_frame(dice, 224, 448)) for _ in range(32))


TRACES: dict[str, Callable[[random.Random], Layout]] = {
    "mix1": _mix1,
    "mix4": _mix4,
    "video": _video,
    "eight": _eight,
    "burst": _burst,
}
"""How one call is drawn: one image; 1 to 6 images; a video of 4 to 16 temporal patches; 8 and 32 small images."""


def trace(name: str, count: int, seed: int = 0) -> list[Layout]:
    """So many calls of a trace, all different; the first calls do not depend on how many are asked for."""
    dice = random.Random(f"{name} {seed}")
    layouts: dict[Layout, None] = {}
    while len(layouts) < count:
        layouts[TRACES[name](dice)] = None
    return list(layouts)


def rows_of(layout: Layout) -> int:
    """Patches of a call."""
    return sum(math.prod(item) for item in layout)
