"""Attention masks and relative biases on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.contract import check_padding_contract
from tests.support.dense import LAYOUTS, DenseAttention, dense_encoder, item_by_item
from tests.support.encoders import rows_for
from tests.support.gpu import on_gpus
from tests.support.text_models import check_texts, error_of, masks_of, text_encoder, text_model, texts
from varlen_graphs.buffers import GridOffsets, RelativePositionBias, T5Buckets

pytestmark = on_gpus()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("name", ["bert", "modernbert", "clip", "t5"])
def test_whole_models_equal_their_eager_runs(name, dtype, tolerance):
    model = text_model(name, dtype).cuda()
    strict = vg.options.Verify(strict=True, tolerance=tolerance)
    check_texts(text_encoder(name, model, backend="cuda", verify=strict), model, "cuda", tolerance)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_models_with_plain_attention_take_floating_masks(name):
    model = text_model(name, attn_implementation="eager").cuda()
    encoder = text_encoder(name, model, *masks_of(name, dtype=None), backend="cuda")
    check_texts(encoder, model, "cuda", tolerance=1e-3)


@pytest.mark.parametrize("name", ["modernbert", "clip"])
def test_the_mask_of_another_model_is_refused_and_calls_run_eager(name):
    model = text_model(name).cuda()
    encoder = text_encoder(name, model, [vg.buffers.AttentionMask("mask")], backend="cuda", declared_by="recipe")
    with pytest.warns(UserWarning, match="something other than the module itself"):
        encoder.capture()
    ids, mask = texts([60, 33, 64, 1], device="cuda")
    assert error_of(encoder(ids, attention_mask=mask), model(ids, attention_mask=mask), mask) < 1e-3
    assert encoder.stats.eager == {"its budget failed verification": 1}


def test_a_model_that_looks_at_its_mask_names_the_declaration():
    def forward(model, input_ids, attention_mask):
        return model(input_ids, attention_mask=attention_mask)

    encoder = text_encoder("modernbert", text_model("modernbert").cuda(), [], forward, backend="cuda")
    with pytest.raises(vg.errors.CaptureError, match="AttentionMask"):
        encoder.capture()


@pytest.mark.parametrize("dtype", [torch.bool, None])
def test_the_padding_contract_holds_for_packed_rows(dtype):
    module = DenseAttention(buckets=8).cuda()
    index = T5Buckets(8, 20)
    bias = RelativePositionBias("bias", "bias.weight", index)
    encoder = dense_encoder(
        module,
        [vg.buffers.AttentionMask("mask", window=(3, 5), dtype=dtype), *[bias][dtype is torch.bool :]],
        backend="cuda",
    )

    def alone(item):
        row = torch.arange(len(item), device="cuda")
        after = row - row[:, None]
        hidden = (after < -3) | (after > 5)
        own = 0 if dtype is torch.bool else module.bias(index(after)).permute(2, 0, 1)[None]
        return module(item, torch.zeros(hidden.shape, device="cuda").masked_fill(hidden, -1e30) + own)

    def rows(lengths, seed):
        return rows_for(lengths, seed, device="cuda")

    check_padding_contract(encoder, item_by_item(alone), rows, "lengths", LAYOUTS, 1e-3)


@pytest.mark.parametrize(
    "declared",
    [
        vg.buffers.AttentionMask("b", causal=True),
        vg.buffers.AttentionMask("b", per="frame", window=(5, 2), dtype=torch.float16),
        vg.buffers.AttentionMask("b", per=vg.layouts.Windows(2)),
        RelativePositionBias("b", torch.randn(32, 2), T5Buckets(32, 100)),
        RelativePositionBias("b", torch.randn(7 * 9, 2), GridOffsets(4, 5), ("h", "w")),
        RelativePositionBias("b", torch.randn(3 * 3, 2), GridOffsets(2, 2), ("h", "w"), "merge_block"),
    ],
    ids=lambda declared: type(declared).__name__,
)
def test_buffers_equal_those_of_the_cpu(declared):
    items = torch.tensor([(2, 4, 4), (1, 2, 4), (1, 4, 2), (0, 0, 0)])
    budget, layout = vg.budgets.Budget(64, items=4, segments=16), vg.GridTHW(merge=2)
    expected = declared.produce(vg.layouts.ItemTable(items, budget, layout), None)
    if isinstance(declared, RelativePositionBias):
        object.__setattr__(declared, "table", declared.table.cuda())
    got = declared.produce(vg.layouts.ItemTable(items.cuda(), budget, layout), None)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
