"""An unmodified text encoder on packed rows: windows in some layers, all of a document in others."""

import pytest
import torch
import transformers

from tests.support.contract import check_padding_contract
from tests.support.encoders import load_example
from tests.support.towers import distance

if transformers.__version__.startswith("4."):
    pytest.skip("ModernBERT of transformers 4 packs rows by itself", allow_module_level=True)

LAYOUTS = [[400, 50, 12], [1], [90, 3, 200], [512], [1, 1, 1, 1]]


def modern_bert(every=2):
    """Weights large enough that attention, and so its window, counts."""
    config = transformers.ModernBertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48,
        local_attention=16, global_attn_every_n_layers=every, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ModernBertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model


def ids_for(lengths, seed=0):
    return torch.randint(100, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def document_by_document(model):
    def run(ids, lengths):
        with torch.no_grad():
            return torch.cat([model(part[None]).last_hidden_state[0] for part in ids.split(lengths)])

    return run


def test_the_padding_contract_holds_with_windows_and_without():
    model = modern_bert()
    encoder = load_example("modern_bert").graph(model, backend="tape")
    check_padding_contract(encoder, document_by_document(model), ids_for, "lengths", LAYOUTS, 1e-5)


def test_the_windows_count():
    ids, windows, whole = (
        ids_for([200]),
        document_by_document(modern_bert()),
        document_by_document(modern_bert(every=1)),
    )
    assert distance(windows(ids, [200]), whole(ids, [200])) > 1e-2
