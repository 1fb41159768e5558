"""SigLIP 2 on real CUDA graphs: padded batches that are packed on their way in."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.gpu import on_gpus
from tests.support.towers import siglip2_tower

pytestmark = on_gpus()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_padded_batches_that_are_packed_on_their_way_in(dtype, tolerance):
    tower = siglip2_tower().cuda().to(dtype)

    def mask(shapes):
        return torch.arange(256, device="cuda") < torch.tensor([h * w for h, w in shapes], device="cuda")[:, None]

    def batch(shapes, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(len(shapes), 256, 48, device="cuda", generator=generator).to(dtype)
        return x.masked_fill(~mask(shapes)[..., None], torch.nan)

    def original(x, shapes):
        with torch.no_grad():
            output = tower(x.nan_to_num(), mask(shapes).int(), torch.tensor(shapes, device="cuda"))
        output.last_hidden_state *= mask(shapes)[..., None]
        return output

    encoder = vg.recipes.siglip2(tower, [vg.budgets.Budget(128, items=6), vg.budgets.Budget(256, items=6)])
    layouts = [[(16, 16)], [(1, 2)], [(8, 6), (3, 5), (2, 2)], [(8, 16)], [(2, 4)] * 6, [(2, 60), (5, 13)]]
    check_padding_contract(
        encoder, original, batch, "spatial_shapes", layouts, tolerance,
        more=lambda shapes: {"pixel_attention_mask": mask(shapes)},
    )  # fmt: skip
