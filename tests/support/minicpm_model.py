"""Whole models MiniCPM-V, small: a language model around the modules of `tests.support.minicpm`, and prompts for them."""

from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.minicpm import models, slices_of

QUERIES = 6


class MiniCPMV(nn.Module):
    """Names and methods are those of the code that comes with the weights; what they compute is the same."""

    def __init__(self, version, seed=0, batch_vision_input=False):
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        torch.manual_seed(seed)
        self.llm = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100, pad_token_id=0))
        self.vpm, self.resampler = models(version, seed)
        self.version = version
        self.config = SimpleNamespace(batch_vision_input=batch_vision_input, vision_batch_size=2)

    def get_vllm_embedding(self, data):
        features = data.get("vision_hidden_states") or self._features(data)
        embeddings = self.llm.model.embed_tokens(data["input_ids"]).clone()
        for at, (bounds, own) in enumerate(zip(data["image_bound"], features, strict=True)):
            if len(own):
                embeddings[at, torch.cat([torch.arange(*bound) for bound in bounds.tolist()])] = own.flatten(0, 1)
        return embeddings, features

    def _features(self, data):
        slices = [one for prompt in data["pixel_values"] for one in prompt]
        if not slices:
            return [[] for _ in data["pixel_values"]]
        sizes = torch.vstack([sizes for sizes in data["tgt_sizes"] if isinstance(sizes, torch.Tensor)]).int()
        if self.version == "2.5" and not self.config.batch_vision_input:
            alone = [
                self.resampler(self._run(one[None], None), size[None]) for one, size in zip(slices, sizes, strict=True)
            ]
            features = torch.cat(alone)
        else:
            longest = max(one.shape[-1] for one in slices)
            pixels = torch.stack([F.pad(one, (0, longest - one.shape[-1])) for one in slices])
            some = self.config.vision_batch_size
            x = torch.cat([self._run(*both) for both in zip(pixels.split(some), sizes.split(some), strict=True)])
            ids = data.get("temporal_ids")
            groups = () if ids is None else ([[int(i) for i in group] for prompt in ids for group in prompt],)
            features = self.resampler(x, sizes, *groups)
        starts = torch.tensor([0, *map(len, data["pixel_values"])]).cumsum(0).tolist()
        return [features[start:end] for start, end in pairwise(starts)]

    def _run(self, pixels, sizes):
        patches = pixels.shape[-1] // self.vpm.embeddings.patch_size
        if self.version == "2.5":  # whose mask hides nothing
            return self.vpm(pixels, torch.ones(len(pixels), 1, patches, dtype=torch.bool)).last_hidden_state
        mask = (torch.arange(patches) < sizes.prod(1)[:, None])[:, None]
        return self.vpm(pixels, patch_attention_mask=mask, tgt_sizes=sizes).last_hidden_state

    def generate(self, input_ids, attention_mask, vision_hidden_states=None, **data):
        data |= {"input_ids": input_ids}
        if vision_hidden_states is not None:
            data["vision_hidden_states"] = vision_hidden_states
        embeddings, _ = self.get_vllm_embedding(data)
        return self.llm.generate(
            inputs_embeds=embeddings, attention_mask=attention_mask, max_new_tokens=4, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        ).logits  # fmt: skip


def prompts(sizes, temporal_ids=None, seed=0):
    """A batch of prompts with slices of these sizes each, as a processor returns it."""
    counts = [*map(len, sizes if temporal_ids is None else temporal_ids)]
    length = 4 + QUERIES * max(counts)
    bounds = [[(2 + QUERIES * at, 2 + QUERIES * (at + 1)) for at in range(count)] for count in counts]
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "input_ids": torch.randint(1, 100, (len(sizes), length), generator=generator),
        "attention_mask": torch.ones(len(sizes), length, dtype=torch.bool),
        "pixel_values": [slices_of(own, seed + at) for at, own in enumerate(sizes)],
        "tgt_sizes": [torch.tensor(own) if own else [] for own in sizes],
        "image_bound": [torch.tensor(own).view(-1, 2) for own in bounds],
    }
    if temporal_ids is not None:
        batch["temporal_ids"] = [[[torch.tensor(i) for i in group] for group in prompt] for prompt in temporal_ids]
    return batch
