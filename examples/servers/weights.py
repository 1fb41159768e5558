"""Models with random weights, and a processor, for the servers beside this file. Yours come from `from_pretrained`."""

import string
import tempfile

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

from examples.generate import make_model
from examples.servers.device import DEVICE

SMALL = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "deepstack_visual_indexes": [0]}


def processor():
    """The image processor of Qwen3-VL, for small images."""
    name = "Qwen2VLImageProcessorPil" if hasattr(transformers, "Qwen2VLImageProcessorPil") else "Qwen2VLImageProcessor"
    size = {"shortest_edge": 32 * 32, "longest_edge": 448 * 448}
    return getattr(transformers, name)(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=size)


def tower():
    """The vision tower of Qwen3-VL: small on a CPU."""
    torch.manual_seed(0)
    return Qwen3VLVisionModel(Qwen3VLVisionConfig(**SMALL if DEVICE == "cpu" else {})).to(DEVICE).eval()


def vision_language_model():
    """A whole Qwen3-VL."""
    return make_model(DEVICE)


def sentence_transformer():
    """A small BERT whose tokens are letters, with mean pooling."""
    torch.manual_seed(0)
    letters = [prefix + letter for prefix in ("", "##") for letter in string.ascii_lowercase]
    vocabulary = {token: at for at, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters])}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        transformers.BertModel(transformers.BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
        transformers.BertTokenizer(vocab=vocabulary, model_max_length=64).save_pretrained(folder)
        return SentenceTransformer(modules=[Transformer(folder), Pooling(64, "mean"), Normalize()], device=DEVICE)
