"""Keyword arguments by which towers of transformers take tensors that they would compute."""

import inspect
import linecache
import re

from varlen_graphs.doctor.branches import function_around
from varlen_graphs.torch_dispatch.lines import Line

_POPPED = re.compile(r"""kwargs\.pop\(["'](\w+)["']""")


def precomputed_arguments(line: Line) -> list[str]:
    """Return the keyword arguments that the function around a line takes instead of computing what the line is for."""
    first = function_around(line)
    if not first or line.function in ("forward", "__call__"):
        return []
    body = inspect.getblock(linecache.getlines(line.file)[first - 1 :])
    return list(dict.fromkeys(_POPPED.findall("".join(body))))
