"""Source lines of user code, found in the frames of a call stack or a traceback."""

import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch

_PACKAGE = Path(__file__).parent.parent
_DOCTOR = f"{_PACKAGE / 'doctor'}{os.sep}"
_RUNNERS = (_DOCTOR, f"{_PACKAGE / 'graphs'}{os.sep}", f"{_PACKAGE / 'recipes' / 'probes'}{os.sep}")
"""Files that run modules: beyond them is no code of a module."""
_ROOMS = ("attention", "capture", "huggingface", "kernels", "shadows", "torch_dispatch", "verify")
_LIBRARIES = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(torch.__file__).parent.with_name('triton')}{os.sep}",
    *(f"{_PACKAGE / room}{os.sep}" for room in _ROOMS),
    f"{_PACKAGE / 'recipes' / 'modes'}{os.sep}",
    *_RUNNERS,
)
"""Files that hold no user code: torch, Triton, and what of this library a forward calls or runs under."""

_TORCH_MODULES = f"{Path(torch.__file__).parent / 'nn' / 'modules'}{os.sep}"
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


class Line(NamedTuple):
    """A source line, numbered from 1, and the name of the enclosing function."""

    file: str
    number: int
    function: str

    @property
    def source(self) -> str:
        """Text of the line, stripped."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}, in {self.function}: {self.source}"


UNKNOWN_LINE = Line("an unknown file", 0, "an unknown function")


def user_lines() -> Iterator[Line]:
    """Yield the lines of user code on the current stack, innermost first, up to what runs the module.

    If that is a module of torch, the innermost forward counts as user code. Generated code is left out, see `_written`.
    """
    frames = _user_frames(sys._getframe(1))
    first = next(frames, None)
    if first is None:
        return
    if _has_source(first[0]):
        yield line_of(*first)
        yield from (line_of(*one) for one in frames if _has_source(one[0]))
    else:
        yield from (line_of(*one) for one in _written([first, *frames]))


def _user_frames(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of user code and their current lines, see `user_lines`."""
    found, of_torch = False, None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            found = True
            yield frame, frame.f_lineno
        elif file.startswith(_TORCH_MODULES) and frame.f_code.co_name == "forward":
            of_torch = of_torch or (frame, frame.f_lineno)
        elif file.startswith(_RUNNERS) and (found or of_torch):
            if not found and of_torch:
                yield of_torch
            return
        frame = frame.f_back


def _has_source(frame: FrameType) -> bool:
    """Return True if the text of a frame's code is known, which that of generated code mostly is not."""
    return bool(linecache.getlines(frame.f_code.co_filename, frame.f_globals))


def _written(frames: Sequence[tuple[FrameType, int]]) -> Sequence[tuple[FrameType, int]]:
    """Return the frames, innermost first, whose code somebody wrote, where the innermost is of generated code.

    A library that generates code calls it; the line that called the library says more. If that is outside of the run,
    in this package, the nearest frame with a source is the first. If none has a source, all frames are returned.
    """
    written = [one for one in frames if _has_source(one[0])]
    library = _package_of(written[0][0]) if written else ""
    callers = [*dropwhile(lambda one: _package_of(one[0]) == library, written)]
    inside = callers and not callers[0][0].f_code.co_filename.startswith(f"{_PACKAGE}{os.sep}")
    return callers if inside else written or frames


def _package_of(frame: FrameType) -> str:
    """Return the name of the outermost package of a frame."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def names_cpu() -> bool:
    """Return True if the innermost function of user code has the constant `"cpu"`, and no other name of a device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    constants = () if frame is None else frame.f_code.co_consts
    return "cpu" in constants and "cuda" not in constants


def is_user_code(file: str) -> bool:
    """Return True for the file of a function that is neither torch's, nor Triton's, nor what a forward runs of ours."""
    return not file.startswith(_LIBRARIES)


def raising_line(trace: TracebackType | None) -> Line:
    """Return the innermost line of user code in a traceback; that of generated code is its caller's."""
    frames = [one for one in traceback.walk_tb(trace) if not one[0].f_code.co_filename.startswith(_LIBRARIES)]
    frames.reverse()
    if frames and not _has_source(frames[0][0]):
        return line_of(*_written(frames)[0])
    return line_of(*frames[0]) if frames else UNKNOWN_LINE


def raising_package(trace: TracebackType | None) -> str:
    """Return the package of the innermost frame in a traceback that is not torch's; empty if all are."""
    packages = [_package_of(frame) for frame, _ in traceback.walk_tb(trace)]
    return next((package for package in reversed(packages) if package != "torch"), "")


def line_of(frame: FrameType, number: int) -> Line:
    """Return a line of a frame; that of a comprehension is one of the function around it."""
    inside: FrameType | None = frame
    while inside is not None and inside.f_code.co_name in _COMPREHENSIONS:
        inside = inside.f_back
    return Line(frame.f_code.co_filename, number, (inside or frame).f_code.co_name)
