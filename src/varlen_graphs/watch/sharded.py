"""Tensors that `torch.distributed` wraps: weights of which each rank has a shard, results of collectives under way."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from varlen_graphs.errors import SpecError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PACKAGE = "torch.distributed."


def is_wrapper(cls: type) -> bool:
    """Whether tensors of this class are `DTensor`s, or wait for a collective when they are first used."""
    return cls.__module__.startswith(PACKAGE)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in memory of its own: of a `DTensor` the shard. Waits for nothing."""
    inner: Any = tensor
    while is_wrapper(type(inner)):  # a shard may be the result of a collective
        inner = inner._local_tensor if hasattr(inner, "_local_tensor") else inner.elem
    plain: Tensor = inner
    return plain


def whole(tensor: Tensor, name: str) -> Tensor:
    """A tensor of which each rank must have all: one that is sharded is refused, others are waited for.

    Raises:
        SpecError: Each rank has a shard of it.
    """
    if type(tensor) in (Tensor, nn.Parameter):  # nearly always, and all that torch's compiler can follow
        return tensor
    placements = getattr(tensor, "placements", ())
    if not all(placement.is_replicate() for placement in placements):
        raise SpecError(
            f"{name} is sharded over ranks, {placements}: expected all of it on every rank; leave its module out of "
            "the plan of parallelize_module, or give that style output_layouts=Replicate()"
        )
    inner: Any = tensor
    while is_wrapper(type(inner)):
        inner = inner._local_tensor if hasattr(inner, "_local_tensor") else inner.wait()
    plain: Tensor = inner
    return plain


def sharding(tensor: Tensor) -> tuple[object, ...]:
    """How a tensor is sharded, and over how many ranks; empty where it is not."""
    mesh = getattr(tensor, "device_mesh", None)
    return () if mesh is None else (getattr(tensor, "placements", ()), mesh.size())


def mesh_of(module: nn.Module) -> "DeviceMesh | None":
    """The mesh of ranks that the weights of a module are sharded over; `None` where there is none."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in module.parameters())
    return next((mesh for mesh in meshes if mesh is not None), None)
