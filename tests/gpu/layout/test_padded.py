"""Layouts beside packed images on real graphs: padded batches, sound, rows in another dimension."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.towers import distance, qwen3_omni_audio_tower, siglip2_tower
from varlen_graphs.attention.transformers import use_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

DIM = 64


class Transformer(nn.Module):
    """Torch's own encoder over a padded batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(DIM, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, padding=None):
        return self.encoder(x, src_key_padding_mask=padding)


def test_padded_batches():
    module = Transformer().cuda().eval()
    layout = vg.PaddedMask("padding", dtype=torch.bool, real=False)
    budgets = [vg.Budget.padded(batch, length) for batch in (2, 8) for length in (32, 96)]
    encoder = vg.GraphedEncoder(module, budgets, vg.BufferSpec(vg.PackedRows("x", shape=(DIM,)), layout)).capture()
    for seed, lengths in enumerate(([5, 30], [96] * 8, [1], [90, 3, 40, 40, 7], [20] * 20, [64, 96, 1])):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(len(lengths), max(lengths), DIM, device="cuda", generator=generator)
        padding = torch.arange(max(lengths), device="cuda") >= torch.tensor(lengths, device="cuda")[:, None]
        x[padding] = torch.nan
        expected = torch.zeros_like(x)
        with torch.no_grad():
            for item, length in enumerate(lengths):
                expected[item, :length] = module(x[item : item + 1, :length])[0]
        encoder.poison()
        for mask in (padding, padding.cpu()):
            torch.testing.assert_close(encoder(x, padding=mask), expected, rtol=1e-3, atol=1e-3)
    assert not encoder.stats.eager


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_sound(dtype, tolerance):
    tower = qwen3_omni_audio_tower().cuda().to(dtype)

    def original(features, lengths):
        with torch.no_grad(), use_attention(tower):
            output = tower(features, feature_lens=torch.tensor(lengths, device="cuda"))
        output.pooler_output = output.last_hidden_state
        return output

    def frames(lengths, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(16, sum(lengths), device="cuda", generator=generator).to(dtype)

    encoder = vg.recipes.qwen3_omni_audio(tower, [vg.Budget(512, items=3), vg.Budget(1024, items=6)])
    layouts = [[1024], [1], [37], [37, 99, 5], [100], [200], [400, 400], [201, 99, 101], [512], [250, 37, 100]]
    check_padding_contract(encoder, original, frames, "feature_lens", layouts, tolerance)


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

    encoder = vg.recipes.siglip2(tower, [vg.Budget(128, items=6), vg.Budget(256, items=6)])
    layouts = [[(16, 16)], [(1, 2)], [(8, 6), (3, 5), (2, 2)], [(8, 16)], [(2, 4)] * 6, [(2, 60), (5, 13)]]
    check_padding_contract(
        encoder, original, batch, "spatial_shapes", layouts, tolerance,
        more=lambda shapes: {"pixel_attention_mask": mask(shapes)},
    )  # fmt: skip


def test_rows_behind_a_batch_of_one():
    class Encoder(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    module = Encoder(DIM, DIM).cuda()
    spec = vg.BufferSpec(vg.PackedRows("x", shape=(1, DIM), rows_dim=1), vg.Lengths(), outputs=vg.Rows(rows_dim=1))
    encoder = vg.GraphedEncoder(module, [64, 128], spec)
    for lengths in ([5, 30], [128], [1], [100, 100]):
        x = torch.randn(1, sum(lengths), DIM, device="cuda")
        with torch.no_grad():
            assert distance(encoder(x, lengths=lengths), module(x)) < 1e-5
        encoder.poison()
