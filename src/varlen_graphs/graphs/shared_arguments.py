"""Check that a module writes to no argument whose memory is that of another one, too."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.errors import SpecError


def check_shared(arguments: Mapping[str, Any], run: Callable[[], Any]) -> None:
    """Run a function if some of its arguments share memory, and check that it leaves these as they were.

    The item table computes each tensor once, so two buffers may be the same. A caller of the module would pass two.

    Args:
        arguments: The arguments, by name.
        run: Runs the module with them.

    Raises:
        SpecError: It writes there.
    """
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
            names[value.untyped_storage().data_ptr()].append(name)
    together = [own for own in names.values() if len(own) > 1]
    before = {name: (arguments[name].clone(), _writes(arguments[name])) for own in together for name in own}
    if not before:
        return
    run()
    for own in together:
        changed = [name for name in own if not torch.equal(arguments[name], before[name][0])]
        written = [name for name in own if _writes(arguments[name]) != before[name][1]]
        begins = Counter(arguments[name].data_ptr() for name in written)  # others may lie beside each other
        written = [name for name in written if begins[arguments[name].data_ptr()] > 1]
        if len(found := changed if len(changed) > 1 else written) > 1:
            raise SpecError(
                f"the module writes in place to an argument out of {', '.join(map(repr, found))}, which are the same "
                f"memory: declare a copy of one, such as DeviceBuffer({found[-1]!r}, lambda table: ....clone()), or "
                "let the module make one"
            )


def _writes(tensor: Tensor) -> int:
    """Return how often a tensor was written; 0 if torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version
