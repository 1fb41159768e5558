"""Tensor subclasses of `torch.distributed`: `DTensor` shards, and results of asynchronous collectives."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from varlen_graphs.errors import SpecError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PACKAGE = "torch.distributed."


def is_distributed_tensor(cls: type) -> bool:
    """Return True for `DTensor`, and for tensors that wait for a collective at their first use."""
    return cls.__module__.startswith(PACKAGE)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's plain tensor, the shard of a `DTensor`, without waiting for a collective."""
    inner: Any = tensor
    while is_distributed_tensor(type(inner)):  # a shard may be the result of a collective
        inner = inner._local_tensor if hasattr(inner, "_local_tensor") else inner.elem
    plain: Tensor = inner
    return plain


def require_replicated(tensor: Tensor, name: str) -> Tensor:
    """Return the plain tensor of one that every rank must have in full; waits for a pending collective."""
    if type(tensor) in (Tensor, nn.Parameter):  # nearly always, and all that torch's compiler can follow
        return tensor
    placements = getattr(tensor, "placements", ())
    if not all(placement.is_replicate() for placement in placements):
        raise SpecError(
            f"{name} is sharded over ranks, {placements}: expected all of it on every rank; leave its module out of "
            "the plan of parallelize_module, or give that style output_layouts=Replicate()"
        )
    inner: Any = tensor
    while is_distributed_tensor(type(inner)):
        inner = inner._local_tensor if hasattr(inner, "_local_tensor") else inner.wait()
    plain: Tensor = inner
    return plain


def sharding(tensor: Tensor) -> tuple[object, ...]:
    """Return the placements of a tensor and the number of ranks of its mesh; empty if it is not sharded."""
    mesh = getattr(tensor, "device_mesh", None)
    return () if mesh is None else (getattr(tensor, "placements", ()), mesh.size())


def mesh_of(module: nn.Module) -> "DeviceMesh | None":
    """Return the device mesh over which the weights of a module are sharded, or `None`."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in module.parameters())
    return next((mesh for mesh in meshes if mesh is not None), None)
