"""A tower of images of any size with a class token and registers before the patches of each."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.leftovers import keep_leftovers
from tests.support.towers import distance, equal_bits

DIM, HEADS, PREFIX = 32, 2, 3
PARTS = ("kept", "dropped", "only")
BUDGETS = (vg.budgets.Budget(64, items=4, max_seqlen=48), vg.budgets.Budget(160, items=6))


class Prefixed(nn.Module):
    """Patches, prefix rows before those of each image, and attention over both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.norm = nn.Linear(8, DIM), nn.Linear(DIM, 3 * DIM), nn.LayerNorm(DIM)
        self.prefix = nn.Parameter(torch.randn(PREFIX, DIM))
        self.eval().requires_grad_(False)

    def forward(self, x, prefix_index, cu_seqlens, max_seqlen, schedule=None):
        x = torch.cat([self.embed(x), self.prefix])[prefix_index]
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (3, HEADS, -1)).unbind(1)
        x = x + vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen, schedule=schedule).flatten(1)
        return dict.fromkeys(PARTS, x)

    def one(self, patches):
        """Return the features of one image, prefix rows first."""
        x = torch.cat([self.prefix, self.embed(patches)])
        q, k, v = self.qkv(self.norm(x)).view(len(x), 3, HEADS, -1).transpose(0, 2).unbind(1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


def prefixed(layout=None, backend="tape", module=None, **options):
    spec = vg.BufferSpec(
        rows=vg.inputs.Rows("x", (8,)),
        layout=layout or vg.layouts.GridHW("sizes", prefix=PREFIX),
        buffers=[
            vg.buffers.PrefixIndex(),
            vg.buffers.CuSeqlens(),
            vg.buffers.MaxSeqlen(),
            vg.buffers.AttentionSchedule(heads=HEADS, head_dim=DIM // HEADS),
        ],
        outputs={part: vg.outputs.Rows(prefix=part) for part in PARTS},
    )
    options = {"verify": vg.options.Verify(strict=True)} | options
    return vg.GraphedEncoder(module or Prefixed(), BUDGETS, spec, backend=backend, **options)


def images(sizes, device="cpu", dtype=torch.float32, seed=0):
    rows = sum(h * w for h, w in sizes)
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def expected(module, x, sizes):
    whole = [module.one(own) for own in x.split([h * w for h, w in sizes])]
    kept, dropped, only = (
        [part(own) for own in whole] for part in (lambda a: a, lambda a: a[PREFIX:], lambda a: a[:PREFIX])
    )
    return {"kept": torch.cat(kept), "dropped": torch.cat(dropped), "only": torch.cat(only)}


def check_prefix(encoder, device, dtype, tolerance):
    """Check the padding contract, and all parts of the output, of an encoder by `prefixed`."""
    most = [(4, 10)] * 4
    for seed, sizes in enumerate(
        ([(3, 4), (1, 1), (6, 8)], [(8, 6)], [(1, 1)] * 6, [(5, 7)] * 9, most, [(2, 5), (4, 4)])
    ):
        x = images(sizes, device, dtype, seed)
        encoder(x, sizes=sizes)
        encoder.poison()
        over_nan = encoder(x, sizes=sizes)
        encoder(images(most, device, dtype, 100), sizes=most)
        keep_leftovers(encoder)
        assert equal_bits(over_nan, encoder(x, sizes=sizes)), sizes
        for part, own in expected(encoder.module, x, sizes).items():
            assert over_nan[part].shape == own.shape
            assert distance(over_nan[part], own) <= tolerance, (part, sizes)
    assert not encoder.stats.eager


class Joint(nn.Module):
    """A block of an MM-DiT: images and texts with weights of their own, and attention over both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(8, 24), nn.Linear(6, 24)
        self.out = nn.ModuleList(nn.Linear(8, width) for width in (8, 6))
        self.eval().requires_grad_(False)

    def forward(self, x, text, join, part, cu_seqlens, max_seqlen):
        q, k, v = torch.cat([self.image(x), self.text(text.flatten(0, 1))])[join].unflatten(1, (3, 2, 4)).unbind(1)
        image, words = (
            vg.varlen_attention(q, k, v, cu_seqlens, max_seqlen).flatten(1)[part].split([len(x), len(join) - len(x)])
        )
        return {"image": x + self.out[0](image), "text": text + self.out[1](words).unflatten(0, (-1, 4))}

    def one(self, x, text):
        q, k, v = torch.cat([self.text(text), self.image(x)]).view(-1, 3, 2, 4).transpose(0, 2).unbind(1)
        words, image = nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1).split([4, len(x)])
        return x + self.out[0](image), text + self.out[1](words)


JOINT = vg.BufferSpec(
    vg.inputs.Rows("x", (8,)),
    vg.layouts.GridHW("sizes", prefix=4),
    [
        vg.buffers.PrefixIndex("join", per_item=True),
        vg.buffers.PrefixIndex("part", inverse=True),
        vg.buffers.CuSeqlens(),
        vg.buffers.MaxSeqlen(),
    ],
    {"image": vg.outputs.Rows(), "text": vg.outputs.Items()},
    inputs=[vg.inputs.PerItem("text", (4, 6))],
)


def joint_one_by_one(module, x, sizes, text):
    """Return what `Joint` gives for each image and its text alone."""
    alone = [module.one(*own) for own in zip(x.split([h * w for h, w in sizes]), text, strict=True)]
    return {"image": torch.cat([image for image, _ in alone]), "text": torch.stack([words for _, words in alone])}
