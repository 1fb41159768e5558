"""MiniCPM-V on real graphs, against the padded originals on the CPU: small modules, the heads of real ones."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.minicpm import models, original, slices_of
from tests.support.towers import distance

pytestmark = on_gpus()

SIZES = [(32, 32), (23, 45), (5, 7), (1, 1)]
LAYOUTS = {
    "2.5": [(SIZES,), ([(3, 3)],), ([(32, 32)] * 4,)],
    "2.6": [(SIZES,), ([(25, 49)],), ([(32, 32)] * 4,)],
    "4.5": [
        (SIZES, [[-1], [4, 12], [-1]]),
        ([(3, 3)],),
        ([(32, 32)] * 4, [[0, 5, 9, 13]]),
        (SIZES, [[3, 4], [1, 900]]),
    ],
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=str)
@pytest.mark.parametrize("version", LAYOUTS)
def test_graphs_equal_the_padded_original(version, dtype, tolerance):
    vision = {"dim": 144, "heads": 2, "hidden": 544, "depth": 2, "patch": 14}
    sizes = {"queries": 96 if version == "2.5" else 64, "dim": 256, "heads": 2, "vision_dim": 144}
    sizes |= {"max_temporal_size": 1000} if version == "4.5" else {}
    exact = [module.to(dtype).float() for module in models(version, 0, vision, sizes)]
    modules = [module.cuda().to(dtype) for module in models(version, 0, vision, sizes)]
    encoder = vg.recipes.minicpmv(
        *modules, [vg.budgets.Budget(2048, items=4), vg.budgets.Budget(4608, items=6)]
    ).capture()
    for seed, layout in enumerate(LAYOUTS[version]):
        slices = [one.to(dtype) for one in slices_of(layout[0], seed, patch=14)]
        if version == "2.5":  # whose positions may depend on device and dtype
            expected = original(*modules, [one.cuda() for one in slices], *layout).cpu()
        else:
            expected = original(*exact, [one.float() for one in slices], *layout)
        rows = vg.recipes.pack_slices(slices).cuda()
        groups = [[torch.tensor(time, device="cuda") for time in group] for group in layout[1:] and layout[1]]
        times = {"temporal_ids": groups} if groups else {}
        encoder.poison()
        on_the_host = encoder(rows, tgt_sizes=layout[0], **times)
        assert distance(on_the_host.cpu(), expected) < tolerance
        encoder.poison()
        on_the_device = encoder(rows, tgt_sizes=torch.tensor(layout[0], device="cuda"), **times)
        assert distance(on_the_device, on_the_host) < tolerance
    assert not {*encoder.stats.eager} - {"faster without padding"}
