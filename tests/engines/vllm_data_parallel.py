"""One rank of two over gloo: towers whole on each rank, and towers sharded over both."""

import json
import os
from pathlib import Path

import tests.engines.vllm_setup  # noqa: F401

# isort: split
import torch
from vllm.config import set_current_vllm_config

import varlen_graphs as vg
from tests.engines.vllm_models import TAPE, engine_config, load, rows_of, start_groups
from tests.support.towers import distance
from varlen_graphs.engines.vllm.graphed import graph_towers

GRIDS = ([(1, 4, 6), (1, 8, 4)], [(1, 10, 12), (1, 4, 4), (2, 4, 4)], [(1, 2, 2)])  # the last leaves a rank idle


@torch.no_grad()
def main():
    rank, folder, model = int(os.environ["RANK"]), Path(os.environ["FOLDER"]), Path(os.environ["MODEL"])
    start_groups(folder, rank, 2)
    plain = load(engine_config(model, ranks=2, mm_encoder_tp_mode="data"))
    on = engine_config(model, TAPE, ranks=2, mm_encoder_tp_mode="data")
    graphed = load(on)
    with set_current_vllm_config(on):
        graph_towers(graphed, on)
    errors = []
    for grid in GRIDS:
        call = {"pixel_values": rows_of(plain, grid), "image_grid_thw": torch.tensor(grid)}
        errors += map(distance, graphed.embed_multimodal(**call), plain.embed_multimodal(**call))
    (encoder,) = vg.encoders(graphed).values()
    on = engine_config(model, TAPE, ranks=2)
    sharded = load(on)
    with set_current_vllm_config(on):
        refused = not graph_towers(sharded, on)
    # The Transformers backend replicates towers but for gated MLPs.
    call = {"pixel_values": torch.randn(56, 96, generator=torch.Generator().manual_seed(0))}
    call |= {"image_grid_thw": torch.tensor(GRIDS[0]), "num_image_patches": torch.tensor([6, 8])}
    graphed_there = []
    for one in (model, Path(os.environ["GATED"])):
        on = engine_config(one, TAPE, ranks=2, model_impl="transformers")
        loaded = load(on)
        want = loaded.embed_multimodal(**call)
        with set_current_vllm_config(on):
            graphed_there.append(bool(graph_towers(loaded, on)))
        errors += map(distance, loaded.embed_multimodal(**call), want)
    results = {
        "error": max(errors), "replays": encoder.stats.replays.total(), "refused": refused,
        "graphed in the Transformers backend": graphed_there,
    }  # fmt: skip
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
