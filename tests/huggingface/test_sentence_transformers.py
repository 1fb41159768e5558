"""SentenceTransformer and CrossEncoder, as they are, on the graphs of their encoder."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import UNVERIFIED
from tests.support.text_encoders import text_model
from tests.support.towers import distance
from varlen_graphs.huggingface.installed import Shared, Understood, install
from varlen_graphs.recipes.padding_consumers import READS_AROUND

pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")

import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import CNN, Dense, Normalize, Pooling, Transformer

WORDS = ["graph", "text", "row", "item", "long", "short", "a", "of", "and", "the"]

TEXTS = [
    "a short text",
    "the long text " * 12,
    "row",
    "graph and item of the row",
    "a",
    "long " * 40,
    "text of a graph",
]


def saved(folder, model, side="right"):
    """Save a model with a tokenizer of a few words, and return the folder."""
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = transformers.BertTokenizer(str(vocabulary), model_max_length=64, padding_side=side)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


BUDGETS = [vg.budgets.Budget(128, items=8)]


def graphed(tower):
    found = Understood(tower, vg.recipes.packed_text, declared=True, options={})
    return install(found, BUDGETS, {"backend": "tape", "verify": UNVERIFIED}, Shared({}))


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "t5"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_encode_gives_the_vectors_of_the_model(tmp_path, name, pooling):
    transformer = Transformer(saved(tmp_path, text_model(name)))
    parts = [transformer, Pooling(transformer.get_embedding_dimension(), pooling), Normalize()]
    model = SentenceTransformer(modules=parts, device="cpu")
    expected = model.encode(TEXTS, batch_size=4)
    installed = graphed(transformer.auto_model)
    for size in (4, 2, 7):
        assert distance(torch.tensor(model.encode(TEXTS, batch_size=size)), torch.tensor(expected)) < 1e-4
    stats = installed.encoder.stats
    assert not stats.eager
    assert stats.replays
    assert stats.items == 3 * len(TEXTS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_that_pools_the_last_token_is_packed(tmp_path, side):
    transformer = Transformer(saved(tmp_path, text_model("qwen3", use_cache=True), side))
    parts = [transformer, Pooling(transformer.get_embedding_dimension(), "lasttoken")]
    model = SentenceTransformer(modules=parts, device="cpu")
    expected = model.encode(TEXTS)
    installed = graphed(transformer.auto_model)
    assert distance(torch.tensor(model.encode(TEXTS)), torch.tensor(expected)) < 1e-4
    assert not installed.encoder.stats.eager


def test_predict_gives_the_scores_of_the_model(tmp_path):
    torch.manual_seed(0)
    config = text_model("bert").config
    config.num_labels = 1
    classifier = transformers.BertForSequenceClassification(config).eval()
    model = CrossEncoder(saved(tmp_path, classifier), device="cpu")
    pairs = [(one, other) for one in TEXTS[:3] for other in TEXTS]
    expected = model.predict(pairs, batch_size=4)
    installed = graphed(model.model.bert)
    assert distance(torch.tensor(model.predict(pairs, batch_size=4)), torch.tensor(expected)) < 1e-4
    assert not installed.encoder.stats.eager
    assert installed.encoder.stats.replays


def test_convolutions_over_tokens_which_read_padding_run_eager(tmp_path):
    transformer = Transformer(saved(tmp_path, text_model("bert")))
    torch.manual_seed(0)
    convolution = CNN(transformer.get_embedding_dimension(), 16)
    parts = [transformer, convolution, Pooling(convolution.get_embedding_dimension(), "mean")]
    model = SentenceTransformer(modules=parts, device="cpu")
    expected, alone = model.encode(TEXTS), model.encode(TEXTS[:1])
    vg.wrap(model, BUDGETS, backend="tape")
    assert distance(torch.tensor(model.encode(TEXTS)), torch.tensor(expected)) < 1e-5
    assert distance(torch.tensor(model.encode(TEXTS[:1])), torch.tensor(alone)) < 1e-5
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.eager == {READS_AROUND: 1}
    assert encoder.stats.replays.total() == 1


def test_queries_that_are_expanded_by_tokens_outside_of_the_mask_run_eager(tmp_path):
    multi_vector = pytest.importorskip("sentence_transformers.multi_vector_encoder", reason="needs MultiVectorEncoder")
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    folder = saved(tmp_path, text_model("bert"))
    transformer = Transformer(folder, query_expansion={"strategy": "fixed", "length": 16})
    torch.manual_seed(0)
    names = dict.fromkeys(["module_input_name", "module_output_name"], "token_embeddings")
    dense = Dense(
        transformer.get_embedding_dimension(), 8, bias=False, activation_function=torch.nn.Identity(), **names
    )
    model = multi_vector.MultiVectorEncoder(modules=[transformer, dense, MultiVectorMask()], device="cpu")

    def scores():
        queries, documents = model.encode_query(TEXTS[:3]), model.encode_document(TEXTS[3:])
        return model.similarity(queries, documents)

    expected = scores()
    vg.wrap(model, BUDGETS, backend="tape")
    assert distance(scores(), expected) < 1e-5
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.eager == {READS_AROUND: 1}
    assert encoder.stats.replays.total() == 1  # of the documents
