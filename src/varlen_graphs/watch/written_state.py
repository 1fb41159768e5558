"""The state of a module ahead of captures and proofs, to put back what their runs write into it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varlen_graphs.watch.kept_state import can_copy, same_bits, version_of
from varlen_graphs.watch.sharded import local_tensor
from varlen_graphs.watch.thread_modes import unwatched

MOST_BYTES = 1 << 26
"""Bytes of buffers to copy, the smallest first."""

FEW = 64
"""Numbers of a parameter that counts as state, which a forward may write: larger ones are weights, and only read."""

_NUMBERS = (bool, int, float)
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


@dataclass(slots=True)
class _Number:
    """A number among the attributes of a module, and its value ahead of all runs and ahead of the present one."""

    attributes: dict[str, Any]
    name: str
    begun: float
    before: Any = None

    @property
    def now(self) -> Any:
        return self.attributes.get(self.name)

    def changed(self) -> bool:
        """Return True if the present run made another number of it."""
        return type(self.now) in _NUMBERS and self.now != self.before

    def put_back(self) -> None:
        """Set it to its value ahead of all runs, unless it was deleted."""
        if self.name in self.attributes:
            self.attributes[self.name] = self.begun


class WrittenState:
    """Copies of buffers, small parameters and numbers of modules, to put back what runs write into them in place.

    Captures and proofs run a module on rows of their own, and on NaN: counters and running maxima would go on from
    there.

    Args:
        parts: The modules.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        parts = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
        found = {id(tensor): tensor for part in parts for tensor in _state(part)}
        self._copies, held = list[tuple[Tensor, Tensor]](), 0
        for tensor in sorted(found.values(), key=lambda tensor: tensor.nbytes):
            held += tensor.nbytes
            if held > MOST_BYTES:
                break
            self._copies.append((tensor, local_tensor(tensor).detach().clone()))
        self._begun = self._last = [version_of(tensor) for tensor, _ in self._copies]
        self._by_all = [True] * len(self._copies)
        self._numbers = [number for part in parts for number in _numbers(part)]
        self._counters = self._numbers  # those that every run so far has changed

    @contextmanager
    def run(self) -> Iterator[None]:
        """Note what the run inside writes."""
        for counter in self._counters:
            counter.before = counter.now
        yield
        with unwatched():  # the rules refuse modules that read such counts
            now = [version_of(tensor) for tensor, _ in self._copies]
        self._by_all = [all(one) for one in zip(self._by_all, map(int.__ne__, self._last, now), strict=True)]
        self._last = now
        self._counters = [counter for counter in self._counters if counter.changed()]

    def restore(self) -> None:
        """Put back all tensors that were written, and numbers if there are any: then numbers tell of tensors."""
        written = [self._put_back(at) for at, before in enumerate(self._begun) if self._may_differ(at, before)]
        if any(written):
            for number in self._numbers:
                number.put_back()

    def restore_what_all_wrote(self) -> None:
        """Put back what every run wrote, tensors and numbers; what the first ones filled, graphs read."""
        for at, written in enumerate(self._by_all):
            if written:
                self._put_back(at)
        for counter in self._counters:
            counter.put_back()

    def _may_differ(self, at: int, version: int) -> bool:
        tensor, _ = self._copies[at]
        return tensor.is_inference() or version_of(tensor) != version

    def _put_back(self, at: int) -> bool:
        """Write a copy back if its tensor differs, unless it was resized, which is another change."""
        tensor, copy = self._copies[at]
        own = local_tensor(tensor)
        if own.shape != copy.shape or same_bits(own, copy):
            return False
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            own.copy_(copy)
        return True


@contextmanager
def runs_of_a_capture(parts: Iterable[nn.Module]) -> Iterator[WrittenState]:
    """Yield the state to tell of each run inside; put back what all runs wrote, or after an error what any did."""
    state = WrittenState(parts)
    try:
        yield state
    except BaseException:
        state.restore()
        raise
    state.restore_what_all_wrote()


@contextmanager
def state_restored(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Put back all that runs inside write into modules."""
    state = WrittenState(parts)
    try:
        yield
    finally:
        state.restore()


def _state(part: nn.Module) -> Iterator[Tensor]:
    for tensor in (*part._parameters.values(), *part._buffers.values()):
        if tensor is not None and can_copy(tensor) and not (isinstance(tensor, nn.Parameter) and tensor.numel() > FEW):
            yield tensor


def _numbers(part: nn.Module) -> Iterator[_Number]:
    for name, value in vars(part).items():
        if type(value) in _NUMBERS and name not in _OF_ANY_MODULE:
            yield _Number(vars(part), name, value)
