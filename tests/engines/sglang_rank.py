"""One of two ranks of SGLang, in a process of its own."""

import pytest
import torch
from sglang.srt.multimodal.mm_utils import run_dp_sharded_mrope_vision_model
from sglang.srt.plugins import load_plugins

import varlen_graphs as vg
from tests.engines.sglang_towers import TOWERS, calls_of, make_tower, start
from tests.support.segments import relative
from varlen_graphs.engines.sglang import graph_towers


@torch.no_grad()
def run(rank, store):
    torch.set_num_threads(1)
    start(store, rank, ranks=2, mm_enable_dp_encoder=True)
    load_plugins()
    for name in TOWERS:
        tower = make_tower(name, use_data_parallel=True)
        encoder = graph_towers(tower, [64, 256], backend="tape")[""]
        for x, grid in calls_of(name):  # some have one item: then a rank has none
            got = run_dp_sharded_mrope_vision_model(tower, x, grid.tolist(), rope_type="rope_3d")
            assert relative(got, encoder.module(x, grid)) < 1e-5
        assert encoder.stats.replays.total() == (5, 2)[rank]
        assert not encoder.stats.eager
        with pytest.raises(vg.errors.SpecError, match=r"sharded over 2 ranks.* try --mm-enable-dp-encoder"):
            graph_towers(make_tower(name), [64], backend="tape")
