"""What the modules of the corpus share: how they are declared, called, and registered.

Each module shows one way to get a wrong number out of a graph, or is the harmless twin of one. On the statements that
the doctor has to name stands the comment `# site`; `# consequence` stands where it may name what follows from them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import varlen_graphs as vg
from tests.support.segments import boundaries

DIM = 8

Expectation = Literal["blocks", "proof", "fine"]
"""The doctor names the sites; only a replay shows that it is wrong, so the proof has to; or nothing is wrong."""


@dataclass(frozen=True)
class Case:
    """A module with its expectation.

    Attributes:
        made: The class, made without arguments.
        expects: What has to happen.
        training: True if the module is in training mode.
        static_args: Further keyword arguments of each call.
        before: Called with the module before each call, and the number of the call.
        takes: Names of the arguments other than the rows.
        eager: True if it runs eager by a documented rule, although nothing is wrong with it.
    """

    made: type[nn.Module]
    expects: Expectation
    training: bool = False
    static_args: Callable[[int], dict[str, Any]] = field(default=lambda at: {})
    before: Callable[[nn.Module, int], None] = field(default=lambda module, at: None)
    takes: tuple[str, ...] = ()
    eager: bool = False

    def module(self) -> nn.Module:
        """Return a new module, always the same."""
        torch.manual_seed(0)
        return self.made().train(self.training)

    @property
    def spec(self) -> vg.BufferSpec:
        """The declaration of the arguments that the module takes."""
        buffers = {
            "cu_seqlens": vg.buffers.CuSeqlens("cu_seqlens"),
            "max_seqlen": vg.buffers.MaxSeqlen("max_seqlen"),
            "item": vg.buffers.DeviceBuffer("item", lambda table: table.row_item),
        }
        taken = [buffer for name, buffer in buffers.items() if name in self.takes]
        return vg.BufferSpec(vg.inputs.Rows("x", shape=(DIM,)), vg.Lengths("lengths"), taken)

    def arguments(self, lengths: Sequence[int], at: int, bound: int | None = None) -> dict[str, Any]:
        """Return the module's own arguments for items of these lengths, without padding."""
        computed: dict[str, Any] = {
            "lengths": torch.tensor(lengths),
            "cu_seqlens": boundaries(lengths),
            "max_seqlen": bound or max(lengths),
            "item": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        }
        return {"x": rows_of(lengths, at)} | {name: computed[name] for name in self.takes} | self.static_args(at)


CASES: dict[str, Case] = {}


def rows_of(lengths: Sequence[int], at: int) -> Tensor:
    """Return the rows of a call."""
    return torch.randn(sum(lengths), DIM, generator=torch.Generator().manual_seed(at))


def case(expects: Expectation, takes: str = "", **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a module of the corpus."""

    def register(made: type[nn.Module]) -> type[nn.Module]:
        CASES[made.__name__] = Case(made, expects, takes=tuple(takes.split()), **options)
        return made

    return register


class Base(nn.Module):
    """A weight, and nothing that mixes rows; `start` makes what else a module has."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)
        self.start()

    def start(self) -> None:
        pass


def table(expects: Expectation, takes: str = "", **forwards: Callable[..., Tensor]) -> None:
    """Register modules by name, each of a weight and one expression, which is its forward."""
    for name, forward in forwards.items():
        case(expects, takes)(type(name, (Base,), {"forward": forward, "__module__": forward.__module__}))
