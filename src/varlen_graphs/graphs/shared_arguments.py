"""Check that a module writes to no argument whose memory is that of another one, too."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.errors import SpecError
from varlen_graphs.shadows.shadow import same_bits


def check_shared(arguments: Mapping[str, Any], run: Callable[[], Any]) -> None:
    """Run a function if some of its arguments share memory, and check that it leaves these as they were.

    The item table computes each tensor once, so two buffers may be the same. A caller of the module would pass two.

    Args:
        arguments: The arguments, by name.
        run: Runs the module with them.

    Raises:
        SpecError: It writes there.
    """
    owners: defaultdict[int, list[str]] = defaultdict(list)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
            owners[value.untyped_storage().data_ptr()].append(name)
    pairs = [pair for names in owners.values() for pair in combinations(names, 2)]
    pairs = [(one, other) for one, other in pairs if _places(arguments[one]) & _places(arguments[other])]
    before = {name: (arguments[name].clone(), _writes(arguments[name])) for pair in pairs for name in pair}
    if not before:
        return
    run()
    for one, other in pairs:
        found = ((arguments[name], *before[name]) for name in (one, other))
        if any(not same_bits(now, content) or _writes(now) != writes for now, content, writes in found):
            raise SpecError(
                f"the module writes in place to {one!r} or {other!r}, which are the same memory: declare a copy of "
                f"one, such as DeviceBuffer({other!r}, lambda table: ....clone()), or let the module make one"
            )


def _places(tensor: Tensor) -> set[int]:
    """Return the addresses of all entries."""
    place = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        place = place[..., None] + step * torch.arange(size, device="cpu")
    return {tensor.data_ptr() + tensor.itemsize * own for own in place.flatten().tolist()}


def _writes(tensor: Tensor) -> int:
    """Return how often a tensor was written; 0 if torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version
