"""What runs of captures and proofs write into the state of a module, put back."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.watch.kept_state import can_copy, same_bits, version_of
from varlen_graphs.watch.sharded import local_tensor

MOST_BYTES = 1 << 26
"""Bytes of buffers to copy, the smallest first."""

FEW = 64
"""Numbers of a parameter that counts as state, which a forward may write: weights are only read."""

_NUMBERS = (bool, int, float)
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def written_state_restored(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Put back what runs inside write in place into buffers and small parameters, and numbers kept beside these.

    Captures and proofs run a module on rows of their own, and on NaN: counters, running maxima and tables that grow
    would go on from there. Numbers are put back only where tensors were written: caches keep numbers, too, and graphs
    read what is in these.
    """
    parts = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
    found = {id(tensor): tensor for part in parts for tensor in _state(part)}
    copies, held = list[tuple[Tensor, int, Tensor]](), 0
    for tensor in sorted(found.values(), key=lambda tensor: tensor.nbytes):
        held += tensor.nbytes
        if held > MOST_BYTES:
            break
        copies.append((tensor, version_of(tensor), local_tensor(tensor).detach().clone()))
    numbers = [(vars(part), _numbers(part)) for part in parts]
    try:
        yield
    finally:
        changed = [(tensor, copy) for tensor, version, copy in copies if _is_written(tensor, version, copy)]
        for tensor, copy in changed:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                local_tensor(tensor).copy_(copy)
        for attributes, before in numbers if changed else ():
            attributes.update({name: value for name, value in before.items() if name in attributes})


def _state(part: nn.Module) -> Iterator[Tensor]:
    for tensor in (*part._parameters.values(), *part._buffers.values()):
        if tensor is not None and can_copy(tensor) and not (isinstance(tensor, nn.Parameter) and tensor.numel() > FEW):
            yield tensor


def _numbers(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if type(value) in _NUMBERS and name not in _OF_ANY_MODULE}


def _is_written(tensor: Tensor, version: int, copy: Tensor) -> bool:
    if tensor.shape != copy.shape:  # resized, which is another change
        return False
    if tensor.is_inference() or version_of(tensor) != version:
        return not same_bits(local_tensor(tensor), copy)
    return False
