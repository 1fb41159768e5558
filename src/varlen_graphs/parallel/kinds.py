"""What must be the same on all ranks: their calls, and what outputs are like."""

import pickle
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from varlen_graphs.errors import RankError, SpecError
from varlen_graphs.spec.call import StaticKey, static_key
from varlen_graphs.spec.outputs import Parts


class Kind(NamedTuple):
    """What the form of an output depends on.

    Attributes:
        statics: The static arguments.
        row_shape: The shape of a row.
        state: How the state of the module differs from construction, if it does.
        autocast: The dtype of autocast, if it is on.
    """

    statics: StaticKey
    row_shape: tuple[int, ...]
    state: str | None
    autocast: torch.dtype | None


def check_statics(statics: Mapping[str, Any]) -> None:
    """Whether ranks can compare static arguments.

    Raises:
        SpecError: One cannot be sent, or does not equal what arrives.
    """
    for name, value in statics.items():
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
    """Whether ranks were called with the same, as far as each has told.

    Raises:
        RankError: They were not.
    """
    for rank, call in enumerate(calls):
        if call != calls[0]:
            raise RankError(
                f"rank {rank} was called with {call}, rank 0 with {calls[0]}: expected the same call on every rank; "
                "with inputs='spread' each may bring items of its own"
            )


def check_form(parts: Parts, form: Parts) -> None:
    """Whether outputs are what other ranks take them for.

    Raises:
        SpecError: They are not.
    """
    came, expected = (
        [(e.rest(tensor), tensor.dtype) for tensor, e in zip(one.tensors, one.extents, strict=True)]
        for one in (parts, form)
    )
    if came != expected:
        raise SpecError(
            f"the entries of the outputs are {came}, those of other items of this kind were {expected}: expected the "
            "same of any items; where the module was cast since, make a new DataParallelEncoder"
        )
    if repr(parts.constants) != repr(form.constants):
        raise SpecError(
            f"the output holds Python values that depend on the items, {form.constants} and {parts.constants}: no rank "
            "encodes all of them; leave these values out, or compute them from the layout outside of the module"
        )
