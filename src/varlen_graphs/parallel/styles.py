"""How the towers of recipes are sharded: styles of `torch.distributed.tensor.parallel`, whose import takes a while."""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from varlen_graphs.errors import SpecError

PROJECTIONS = {
    "linear_fc1": "columns", "linear_fc2": "rows", "fc1": "columns", "fc2": "rows",
    "gate_proj": "columns", "up_proj": "columns", "down_proj": "rows",
}  # fmt: skip
"""How the linear layers of an MLP are sharded, by the names that towers have for them."""


class FusedHeads(ParallelStyle):
    """Attention with one projection `qkv`: each rank has the queries, keys and values of its heads, and their `proj`.

    A contiguous shard of `qkv` would be queries alone on the first ranks. So its output channels are put in the order
    of the ranks first. Load weights before: the global tensor has that order from then on.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        if module.num_heads % ranks:
            raise SpecError(f"{module.num_heads} heads cannot be shared by {ranks} ranks: expected a divisor of them")
        for name, parameter in module.qkv.named_parameters():
            by_rank = parameter.detach().unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
            module.qkv.register_parameter(name, nn.Parameter(by_rank, parameter.requires_grad))
        for style, part in ((ColwiseParallel(), module.qkv), (RowwiseParallel(), module.proj)):
            style.src_data_rank = self.src_data_rank
            style._apply(part, device_mesh)
        module.num_heads //= ranks
        return cast(nn.Module, module)


def plan_of(tower: Any) -> dict[str, ParallelStyle]:
    """The plan for a tower whose blocks have `attn.qkv`, `attn.proj` and an MLP of known names."""
    return dict(_styles(tower))


def _styles(tower: Any) -> Iterator[tuple[str, ParallelStyle]]:
    block = next(iter(getattr(tower, "blocks", ())), None)
    attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    names = [name for name in PROJECTIONS if isinstance(getattr(mlp, name, None), nn.Linear)]
    if not (hasattr(attention, "qkv") and hasattr(attention, "proj") and names):
        raise SpecError(
            f"{type(tower).__name__} has no blocks with attn.qkv, attn.proj and one of {[*PROJECTIONS]} in mlp: give "
            "parallelize_module a plan of your own"
        )
    yield "blocks.*.attn", FusedHeads()
    for name in names:
        yield f"blocks.*.mlp.{name}", ColwiseParallel() if PROJECTIONS[name] == "columns" else RowwiseParallel()
