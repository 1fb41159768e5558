"""Transformers with tensors beside the rows."""

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.declared.case import Case, alone, graphed
from tests.support.declared.packed_images import ATTENTION, BUDGETS, SIZES, calls
from tests.support.encoders import load_example
from tests.support.prefixed import BUDGETS as JOINT_BUDGETS
from tests.support.prefixed import JOINT, Joint, images, joint_one_by_one


def timesteps(device):
    example = load_example("diffusion_transformer")
    encoder = graphed(example.DiT(), BUDGETS, example.spec, device)

    def call(sizes):
        count = len(sizes)
        return {
            "latents": torch.randn(sum(h * w for h, w in sizes), 16),
            "sizes": sizes,
            "timestep": torch.rand(count),
            "label": torch.randint(10, (count,)),
        }

    return Case(encoder, [*map(call, SIZES)], alone(encoder, "latents", ["sizes", "timestep", "label"]))


def joint(device):
    module = Joint()
    some = [{"x": images(sizes), "sizes": sizes, "text": torch.randn(len(sizes), 4, 6)} for sizes in SIZES]
    run = lambda **call: joint_one_by_one(module, **call)  # noqa: E731
    return Case(graphed(module, JOINT_BUDGETS, JOINT, device), some, run)


class Cross(nn.Module):
    """Attention of the rows of each item to its memory of a fixed length."""

    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.heads, self.q, self.kv = heads, nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)

    def forward(self, x, memory, cu_seqlens, max_seqlen, cu_memory):
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self.kv(memory.flatten(0, 1)).unflatten(-1, (2, self.heads, -1)).unbind(1)
        length = memory.shape[1]
        return vg.varlen_attention(
            q, k, v, cu_seqlens, max_seqlen, cu_seqlens_k=cu_memory, max_seqlen_k=length
        ).flatten(1)


def cross(device):
    spec = vg.BufferSpec(
        vg.inputs.Rows("x", (32,)),
        vg.layouts.GridHW("sizes"),
        [vg.buffers.CuSeqlens("cu_memory", queries=7), *ATTENTION],
        inputs=[vg.inputs.PerItem("memory", (7, 32))],
    )
    encoder = graphed(Cross(), BUDGETS, spec, device)
    some = [call | {"memory": torch.randn(len(call["sizes"]), 7, 32)} for call in calls()]
    return Case(encoder, some, alone(encoder, "x", ["sizes", "memory"]))


class Prompted(nn.Module):
    """A prompt and a scale, the same for all rows of a call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, prompt, scale):
        return self.linear(x) * scale + prompt


def prompted(device):
    spec = vg.BufferSpec("x", vg.Lengths(), inputs=[vg.inputs.PerCall("prompt", (32,)), vg.inputs.PerCall("scale")])
    module = Prompted()
    some = [
        {"x": torch.randn(sum(lengths), 32), "lengths": lengths, "prompt": torch.randn(32), "scale": scale}
        for lengths, scale in (([9, 40], 0.5), ([3], 2.0), ([60, 50, 70], 1.25))
    ]
    run = lambda x, lengths, prompt, scale: module(x, prompt, scale)  # noqa: E731
    return Case(graphed(module, BUDGETS, spec, device), some, run)


DIFFUSION = {
    "a timestep and class per image (DiT)": timesteps,
    "joint attention with texts (MM-DiT)": joint,
    "cross attention to a memory per item": cross,
    "a prompt and a scale per call": prompted,
}
