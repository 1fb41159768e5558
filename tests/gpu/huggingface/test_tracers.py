"""Tracers of a wrapped text model see the model itself on a GPU, too, and leave its graphs as they are."""

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.towers import distance

pytestmark = on_gpus()

transformers = pytest.importorskip("transformers", minversion="5.20")

SIZES = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip


class Encoded(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def call(lengths, seed):
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    return ids.cuda(), mask.cuda()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("captured", [False, True])
def test_a_trace_and_an_export_are_those_of_the_model(captured):
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, attn_implementation="eager"))
    plain = Encoded(model.cuda().eval().requires_grad_(False))
    one, other = call([12, 3], 0), call([5, 12], 1)
    expected, real = plain(*other), other[1].bool()
    wrapped = Encoded(vg.wrap(model, [64]))
    if captured:
        wrapped(*one)
    assert distance(torch.jit.trace(wrapped, one, check_trace=False)(*other), expected) < 1e-5
    assert distance(torch.export.export(wrapped, one).module()(*other), expected) < 1e-5
    assert distance(wrapped(*other)[real], expected[real]) < 1e-4
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.replays.total() == 1 + captured
    assert encoder.stats.eager["torch.jit.trace"]


def test_a_part_that_trains_runs_eager_until_it_is_evaluated():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).cuda().eval().requires_grad_(False)
    vg.wrap(model, [64])
    model.head = nn.Sequential(nn.Dropout(0.5)).cuda()
    ids, mask = call([12, 3], 0)
    with pytest.warns(UserWarning, match=r"head.* inside of BertModel is in training mode"):
        model(input_ids=ids, attention_mask=mask)
    model.eval()
    model(input_ids=ids, attention_mask=mask)
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.eager == {"training mode differs from construction": 1}
    assert encoder.stats.replays.total() == 1
