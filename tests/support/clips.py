"""An encoder of clips, whose frames are items that belong together."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for

DIM, QUERIES = 8, 3
COLUMN = vg.layouts.NestedColumn("times", pad=-1, default=-1)
BUDGETS = [vg.budgets.Budget(32, items=3), vg.budgets.Budget(64, items=6, max_seqlen=48)]


class Clips(nn.Module):
    """Rows attend to those of their clip, and learned queries to those of each clip and of each of its frames."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.queries = nn.Parameter(torch.randn(QUERIES, 2, DIM // 2))

    def forward(
        self,
        x,
        cu_clips,
        cu_frames,
        cu_queries,
        max_seqlen,
        clip_schedule,
        query_schedule,
        frame_schedule,
        sizes,
        times,
    ):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(1)
        rows = vg.varlen_attention(q, k, v, cu_clips, max_seqlen, schedule=clip_schedule).flatten(1)
        queries = self.queries.repeat(len(sizes), 1, 1)
        clips, frames = (
            vg.varlen_attention(
                queries, k, v, cu_queries, QUERIES, cu_seqlens_k=keys, max_seqlen_k=max_seqlen, schedule=schedule
            ).flatten(1)
            for keys, schedule in ((cu_clips, query_schedule), (cu_frames, frame_schedule))
        )
        return {"rows": rows, "clips": clips, "frames": frames, "times": times + 2}

    def plain(self, x, sizes, times):
        """The same, clip by clip."""

        def attend(q, k, v):
            return nn.functional.scaled_dot_product_attention(*(y.transpose(0, 1) for y in (q, k, v))).transpose(0, 1)

        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(1)
        lengths = [h * w for h, w in sizes]
        groups = [group if isinstance(group, list) else [group] for group in times]
        clips, first = [], 0
        for group in groups:
            clips.append(sum(lengths[first : first + len(group)]))
            first += len(group)
        parts = {
            name: list(zip(q.split(cuts), k.split(cuts), v.split(cuts), strict=True))
            for name, cuts in (("clips", clips), ("frames", lengths))
        }
        output = {"rows": torch.cat([attend(*part) for part in parts["clips"]]).flatten(1)}
        for name, own in parts.items():
            output[name] = torch.cat([attend(self.queries, k, v) for _, k, v in own]).flatten(1)
        return output | {"times": torch.tensor([time + 2 for group in groups for time in group])}


def clips_encoder(budgets=BUDGETS, **options):
    schedules = {"heads": 2, "head_dim": DIM // 2}
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("x", shape=(DIM,)),
        layout=vg.layouts.GridHW("sizes", columns=(COLUMN,)),
        buffers=[
            vg.buffers.CuSeqlens("cu_clips", per="group"),
            vg.buffers.CuSeqlens("cu_frames"),
            vg.buffers.CuSeqlens("cu_queries", per="group", queries=QUERIES),
            vg.buffers.MaxSeqlen(per="group"),
            vg.buffers.AttentionSchedule(**schedules, name="clip_schedule", per="group"),
            vg.buffers.AttentionSchedule(**schedules, name="query_schedule", per="group", queries=QUERIES),
            vg.buffers.AttentionSchedule(**schedules, name="frame_schedule", queries=QUERIES),
        ],
        outputs=vg.outputs.Fields(
            rows=vg.outputs.Rows(),
            clips=vg.outputs.Groups(rows=QUERIES),
            frames=vg.outputs.Items(rows=QUERIES),
            times=vg.outputs.Items(),
        ),
    )
    return vg.GraphedEncoder(Clips(), budgets, spec, **({"backend": "tape"} | options))


def clip_rows(sizes, seed=0):
    """Return random rows for frames of these sizes."""
    return rows_for([h * w for h, w in sizes], seed)
