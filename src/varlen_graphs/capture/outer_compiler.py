"""Calls that a `torch.compile` around them leaves as they are."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from varlen_graphs.capture.torch_modes import INSTEAD

REASON = f"varlen_graphs replays a graph here, which no compiler sees; to export or compile all of it, {INSTEAD}"

Method = TypeVar("Method", bound=Callable[..., Any])


def not_compiled(method: Method) -> Method:
    """Mark a method: an outer compiler breaks its graph there, and sees neither its frame nor those that it calls.

    `torch.compiler.disable` would import the compiler, and add a frame to every call. Where the compiler may not break
    its graph, as in `torch.export(strict=True)`, its error has `REASON`.
    """
    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    method._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    return method
