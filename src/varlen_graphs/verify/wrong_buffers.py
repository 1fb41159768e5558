"""Name the declared buffers that are wrong, by the values that the module's own run had."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from varlen_graphs.checks.values import quoted
from varlen_graphs.graphs.forward import Forward
from varlen_graphs.outputs.parts import flatten
from varlen_graphs.torch_dispatch.lines import is_user_code
from varlen_graphs.torch_dispatch.profile import profiled
from varlen_graphs.verify.compare import Example

FEW = 9
"""Number of entries of a tensor that a message shows."""


def wrong_buffers(forward: Forward, example: Example, limit: float) -> str:
    """Return sentences that name the declared buffers which make the output wrong; empty if that cannot be told.

    The module itself runs the call, and the values of its variables that have the name of a buffer are what it should
    be. A buffer is wrong if the output is right with the values of all, and wrong with all but its own.

    Args:
        forward: The forward, which gives a wrong output for the call without padding.
        example: A call with all of the caller's arguments, and the expected output.
        limit: Largest error allowed.
    """
    call, names = example.call, [buffer.name for buffer in forward.spec.buffers]
    if not names or not (call.original and forward.answers_itself(call)):
        return ""
    with suppress(Exception):  # of the module's own code: this is a message about another error
        declared = forward.exact_buffers(call)
        with _variables(names) as seen:
            forward.answer(call)
        own = {name: value for name in names for value in seen[name] if _form(value) == _form(declared[name])}

        def right(values: Mapping[str, Any]) -> bool:
            output = flatten(forward.exact(call, buffers=values), forward.spec.declared)
            return example.furthest(output).error <= limit

        if own and right(own):
            wrong = [name for name in own if not right({**own, name: declared[name]})]
            return " ".join(
                f"Buffer {name!r} is wrong: it is {_shown(declared[name])}, where the module's own run had "
                f"{_shown(own[name])}, with which the output is right."
                for name in wrong
            )
    return ""


@contextmanager
def _variables(names: list[str]) -> Iterator[defaultdict[str, list[Any]]]:
    """Collect the values that variables of these names have in functions of user code, in this thread."""
    seen = defaultdict[str, list[Any]](list)

    def look(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "return") and is_user_code(frame.f_code.co_filename):
            for name in names:
                if name in frame.f_code.co_varnames and (value := frame.f_locals.get(name)) is not None:
                    seen[name].append(value)

    with profiled(look):
        yield seen


def _form(value: Any) -> Any:
    """Return the form of a value: its structure, and the dimensions and kinds of its tensors."""
    leaves, structure = tree_flatten(value)
    return structure, [
        (leaf.dim(), leaf.is_floating_point()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves
    ]


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        flat = value.flatten()[:FEW].tolist()
        more = ", ..." if value.numel() > FEW else ""
        return f"[{', '.join(f'{entry:.4g}' if isinstance(entry, float) else str(entry) for entry in flat)}{more}]"
    return quoted(value)
