"""Check that calls and the form of outputs are the same on all ranks."""

import pickle
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from varlen_graphs.declaration.static_args import StaticKey, static_key
from varlen_graphs.errors import RankError, SpecError
from varlen_graphs.outputs.parts import Parts


class Kind(NamedTuple):
    """Everything that the form of an output depends on."""

    static_args: StaticKey
    row_shape: tuple[int, ...]
    state: str | None  # difference of the module's state from construction
    autocast: torch.dtype | None  # if on
    trained: str | None  # why the call needs gradients, if it does


def check_static_args(static_args: Mapping[str, Any]) -> None:
    """Raise `SpecError` if a static argument cannot be pickled, or does not equal its copy."""
    for name, value in static_args.items():
        sent = static_key({name: value})
        wrong = (
            f"argument {name!r} is {value!r}, which ranks cannot compare: expected a value that can be pickled, and "
            "that equals its copy in another process, such as a number, a string or a frozen dataclass"
        )
        try:
            arrives = pickle.loads(pickle.dumps(sent))
        except Exception as error:
            raise SpecError(f"{wrong}; pickle says: {error}") from error
        if arrives != sent:
            raise SpecError(wrong)


def check_same(calls: Sequence[Hashable]) -> None:
    """Raise `RankError` if ranks were called with different arguments."""
    for rank, call in enumerate(calls):
        if call != calls[0]:
            raise RankError(
                f"rank {rank} was called with {call}, rank 0 with {calls[0]}: expected the same call on every rank; "
                "with inputs='spread' each rank may bring its own items"
            )


def check_form(parts: Parts, form: Parts) -> None:
    """Raise `SpecError` if outputs do not have the form that other ranks expect."""
    actual, expected = (
        [(e.rest(tensor.shape), tensor.dtype) for tensor, e in zip(one.tensors, one.extents, strict=True)]
        for one in (parts, form)
    )
    if actual != expected:
        raise SpecError(
            f"the entries of the outputs are {actual}, those of earlier items were {expected}: expected the same shape "
            "and dtype for all items; if the module was cast since, make a new DataParallelEncoder"
        )
    if repr(parts.constants) != repr(form.constants):
        raise SpecError(
            f"the output holds Python values that depend on the items, {form.constants} and {parts.constants}: "
            "expected values that do not, because no rank encodes all items; leave them out of the output, or compute "
            "them from the layout outside of the module"
        )
