"""Calls of encoders inside of the module: they replay graphs of their own, and are not examined."""

import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.torch_dispatch.lines import UNKNOWN_LINE, Line, line_of

_DOCTOR = str(Path(__file__).parent)
_LIBRARIES = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
ENCODER_CALLS = GraphedEncoder.forward.__code__, GraphedEncoder.eager.__code__
"""Code of the methods that answer a call."""


class EncoderCall(NamedTuple):
    """A call of an encoder: the class of its module, and the line of user code that calls it."""

    name: str
    line: Line


def running_encoder() -> EncoderCall | None:
    """Return the outermost call of an encoder on the stack, up to the call of the doctor."""
    frame: FrameType | None = sys._getframe(1)
    found: EncoderCall | None = None
    encoder: GraphedEncoder | None = None
    started = False
    while frame is not None:
        code = frame.f_code
        of_doctor = code.co_filename.startswith(_DOCTOR)
        if of_doctor and started:
            break
        started |= not code.co_filename.startswith(_LIBRARIES) or code in ENCODER_CALLS
        if code in ENCODER_CALLS:
            encoder, found = frame.f_locals["self"], None
        elif encoder is not None and found is None and not code.co_filename.startswith(_LIBRARIES):
            found = EncoderCall(type(encoder.module).__name__, line_of(frame, frame.f_lineno))
        frame = frame.f_back
    return found or (None if encoder is None else EncoderCall(type(encoder.module).__name__, UNKNOWN_LINE))
