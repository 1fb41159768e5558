"""Shard the towers of recipes with styles of `torch.distributed.tensor.parallel`, whose import is slow."""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from varlen_graphs.errors import SpecError, counted

PROJECTIONS = {
    "linear_fc1": "columns", "linear_fc2": "rows", "fc1": "columns", "fc2": "rows",
    "gate_proj": "columns", "up_proj": "columns", "down_proj": "rows",
}  # fmt: skip
"""Sharding of the linear layers of an MLP, by their names in towers."""


class FusedHeads(ParallelStyle):
    """Shards attention with a fused projection `qkv` by heads: each rank has the `qkv` and the `proj` of its heads."""

    # A contiguous shard of `qkv` would hold only queries on the first ranks, so its output channels are first reordered
    # by rank. Load weights before that: the global tensor keeps this order.
    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        if module.num_heads % ranks:
            raise SpecError(
                f"{counted(module.num_heads, 'head')} cannot be divided among {counted(ranks, 'rank')}: expected a "
                "number of ranks that divides the number of heads"
            )
        for name, parameter in module.qkv.named_parameters():
            by_rank = parameter.detach().unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
            module.qkv.register_parameter(name, nn.Parameter(by_rank, parameter.requires_grad))
        for style, part in ((ColwiseParallel(), module.qkv), (RowwiseParallel(), module.proj)):
            style.src_data_rank = self.src_data_rank
            style._apply(part, device_mesh)
        module.num_heads //= ranks
        return cast(nn.Module, module)


def plan_of(tower: Any) -> dict[str, ParallelStyle]:
    """Return the plan for a tower whose blocks have `attn.qkv`, `attn.proj` and an MLP with known names."""
    return dict(_styles(tower))


def _styles(tower: Any) -> Iterator[tuple[str, ParallelStyle]]:
    block = next(iter(getattr(tower, "blocks", ())), None)
    attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    names = [name for name in PROJECTIONS if isinstance(getattr(mlp, name, None), nn.Linear)]
    if not (hasattr(attention, "qkv") and hasattr(attention, "proj") and names):
        raise SpecError(
            f"{type(tower).__name__} has no blocks with attn.qkv, attn.proj and one of {[*PROJECTIONS]} in mlp: pass "
            "your own plan to parallelize_module"
        )
    yield "blocks.*.attn", FusedHeads()
    for name in names:
        yield f"blocks.*.mlp.{name}", ColwiseParallel() if PROJECTIONS[name] == "columns" else RowwiseParallel()
