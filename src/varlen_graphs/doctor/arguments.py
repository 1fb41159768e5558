"""Description of the arguments of an operator, for the comparison of calls."""

from collections.abc import Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from varlen_graphs.doctor.example_call import Number
from varlen_graphs.doctor.run_record import Value
from varlen_graphs.torch_dispatch.rules import has_storage


class Known(Protocol):
    """Facts about the tensors of a run."""

    def is_host(self, tensor: Tensor) -> bool:
        """Return True if a tensor is on the host."""

    def is_in_list(self, tensor: Tensor) -> bool:
        """Return True if a list among the call's arguments holds a tensor."""

    def sources_of(self, tensor: Tensor) -> Set[Any]:
        """Return the possible sources of a tensor."""


class Arguments(NamedTuple):
    """Arguments of one operator call, except for the contents of device tensors.

    Attributes:
        values: Numbers, dtypes and strings by argument name; host scalars too.
        sizes: Dimensions and element counts of its tensors, and of those of the torch function around it.
        sources: Possible sources of its tensors, see `sources.py`.
        shapes: Shapes of its tensors that are entries of lists among the call's arguments, by their names.
    """

    values: dict[str, Value]
    sizes: dict[str, int]
    sources: dict[str, Set[Any]]
    shapes: dict[str, tuple[int, ...]]


def describe_arguments(named: dict[str, Any], given: Sequence[Tensor], known: Known) -> Arguments:
    """Describe the named arguments of an operator, in a torch function that was given some tensors."""
    described = Arguments({}, {}, {}, {})
    for name, value in (named | {"given": given}).items():
        leaves = [str(leaf) if isinstance(leaf, torch.dtype) else leaf for leaf in tree_leaves(value)]
        if leaves and all(isinstance(leaf, Number) for leaf in leaves):
            described.values[name] = tuple(leaves) if isinstance(value, list | tuple) else leaves[0]
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and known.is_host(leaf) and not leaf.dim():
                described.values[name] = leaf.item()
            elif isinstance(leaf, Tensor) and has_storage(leaf):
                if name != "given" and not known.is_host(leaf):
                    sources = known.sources_of(leaf)
                    described.sources[name if leaf is value else f"{name}[{at}]"] = sources
                    if known.is_in_list(leaf):
                        described.shapes.update({own: tuple(leaf.shape) for own in sources if isinstance(own, str)})
                described.sizes[f"{name}[{at}].numel"] = leaf.numel()
                described.sizes.update({f"{name}[{at}].shape[{dim}]": size for dim, size in enumerate(leaf.shape)})
    return described


def index_numbers(index: Any) -> dict[str, int]:
    """Return the numbers in an index, such as `[0, :n]`, by their place."""
    parts = index if isinstance(index, tuple) else (index,)
    numbers = {f"index[{at}]": part for at, part in enumerate(parts) if type(part) is int}
    for at, part in enumerate(parts):
        if isinstance(part, slice):
            ends = {"start": part.start, "stop": part.stop, "step": part.step}
            numbers |= {f"index[{at}].{name}": end for name, end in ends.items() if type(end) is int}
    return numbers
