"""The vision transformer and the resampler of MiniCPM-V, small: names of parts and padded mathematics of the originals.

The originals come with the weights, as code of their own. These say the same: slices are padded to the longest, masks
hide the padding, and the loops over slices are on the host. The vision transformer of 2.5 is that of transformers.
"""

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

SIDE = 70


class Embeddings(nn.Module):
    def __init__(self, dim, patch, side=SIDE):
        super().__init__()
        self.patch_size, self.num_patches_per_side = patch, side
        self.patch_embedding = nn.Conv2d(3, dim, patch, stride=patch, padding="valid")
        self.position_embedding = nn.Embedding(side * side, dim)

    def forward(self, pixel_values, patch_attention_mask, tgt_sizes=None):
        x = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        return x + self.position_embedding(self.position_ids(x.shape[:2], patch_attention_mask, tgt_sizes).to(x.device))

    def position_ids(self, shape, patch_attention_mask, tgt_sizes):
        side = self.num_patches_per_side
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        position_ids = torch.zeros(shape, dtype=torch.long)
        for index, mask in enumerate(patch_attention_mask):
            height, width = (mask[:, 0].sum(), mask[0].sum()) if tgt_sizes is None else tgt_sizes[index]
            h, w = (
                torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / size), boundaries, right=True) for size in (height, width)
            )
            position_ids[index][mask.view(-1)] = (h[:, None] * side + w).flatten()
        return position_ids


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.scale = self.head_dim**-0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, attention_mask):
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attention_mask.to(q.dtype))
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.fc2, self.activation_fn = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.GELU("tanh")

    def forward(self, x):
        return self.fc2(self.activation_fn(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.self_attn, self.mlp = Attention(dim, heads), MLP(dim, hidden)
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(dim, eps=1e-6) for _ in range(2))

    def forward(self, x, attention_mask):
        x = x + self.self_attn(self.layer_norm1(x), attention_mask)
        return x + self.mlp(self.layer_norm2(x))


class VisionTransformer(nn.Module):
    """`vpm` of MiniCPM-V 2.6, 4.0 and 4.5."""

    def __init__(self, dim=48, heads=2, hidden=96, depth=3, patch=4):
        super().__init__()
        self.embeddings = Embeddings(dim, patch)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(depth))
        self.post_layernorm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, pixel_values, patch_attention_mask=None, tgt_sizes=None):
        x = self.embeddings(pixel_values, patch_attention_mask, tgt_sizes)
        hidden = ~patch_attention_mask.flatten(1)[:, None, None]
        attention_mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)
        attention_mask = attention_mask.to(x.device)
        for layer in self.encoder.layers:
            x = layer(x, attention_mask)
        return BaseModelOutput(last_hidden_state=self.post_layernorm(x))


def vision_transformer_25(dim=48, heads=2, hidden=96, depth=3, patch=4):
    """`vpm` of MiniCPM-V 2.5, which does not know the sizes of slices."""
    sizes = {"hidden_size": dim, "num_attention_heads": heads, "intermediate_size": hidden, "num_hidden_layers": depth}
    return Idefics2VisionTransformer(Idefics2VisionConfig(**sizes, image_size=patch * SIDE, patch_size=patch))


def sincos_1d(dim, positions):
    omega = numpy.arange(dim // 2, dtype=numpy.float32)
    omega /= dim / 2.0
    omega = 1.0 / 10000**omega
    out = numpy.einsum("...,d->...d", positions, omega)
    return numpy.concatenate([numpy.sin(out), numpy.cos(out)], axis=-1)


def sincos_2d(dim, side):
    grid_h, grid_w = numpy.arange(side, dtype=numpy.float32), numpy.arange(side, dtype=numpy.float32)
    grid = numpy.stack(numpy.meshgrid(grid_w, grid_h), axis=0)  # w comes first
    return numpy.concatenate([sincos_1d(dim // 2, grid[0]), sincos_1d(dim // 2, grid[1])], axis=-1)


class Resampler(nn.Module):
    """`resampler` of MiniCPM-V 2.5, 2.6 and 4.0."""

    def __init__(self, queries=6, dim=64, heads=2, vision_dim=48):
        super().__init__()
        self.num_queries, self.embed_dim, self.num_heads = queries, dim, heads
        self.query = nn.Parameter(torch.randn(queries, dim))
        self.kv_proj = nn.Linear(vision_dim, dim, bias=False) if vision_dim != dim else nn.Identity()
        self.attn = nn.MultiheadAttention(dim, heads)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(dim, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(dim**-0.5 * torch.randn(dim, dim))
        self._set_2d_pos_cache(SIDE)

    def _set_2d_pos_cache(self, side, device="cpu"):
        table = torch.from_numpy(sincos_2d(self.embed_dim, side)).float().to(device)
        self.register_buffer("pos_embed", table, persistent=False)

    def _keys(self, x, tgt_sizes):
        """Values and keys `[length, slices, dim]`, and what of them is padding."""
        if int(max(tgt_sizes.flatten())) > len(self.pos_embed):
            self._set_2d_pos_cache(int(max(tgt_sizes.flatten())), x.device)
        lengths = (tgt_sizes[:, 0] * tgt_sizes[:, 1]).tolist()
        padding = (torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]).to(x.device)
        positions = [self.pos_embed[:h, :w].reshape(h * w, -1).to(x.dtype) for h, w in tgt_sizes.tolist()]
        v = self.ln_kv(self.kv_proj(x)).permute(1, 0, 2)
        return v, v + nn.utils.rnn.pad_sequence(positions), padding

    def attend(self, k, v, padding):
        q = self.ln_q(self.query)[:, None].repeat(1, k.shape[1], 1)
        out = self.attn(q, k, v, key_padding_mask=padding)[0].permute(1, 0, 2)
        return self.ln_post(out) @ self.proj

    def forward(self, x, tgt_sizes):
        v, k, padding = self._keys(x, tgt_sizes)
        return self.attend(k, v, padding)


class Resampler45(Resampler):
    """`resampler` of MiniCPM-V 4.5: slices in groups, with a time each, in its batched form."""

    def __init__(self, *args, max_temporal_size=200, batch_infer=True, **kwargs):
        super().__init__(*args, **kwargs)
        self.max_temporal_size = max_temporal_size
        self.batch_infer = batch_infer
        times = sincos_1d(self.embed_dim, numpy.arange(max_temporal_size, dtype=numpy.float32))
        self.register_buffer("temporal_pos_embed", torch.from_numpy(times).float(), persistent=False)

    def forward(self, x, tgt_sizes, temporal_ids=None):
        v, k, padding = self._keys(x, tgt_sizes)
        if temporal_ids is None:
            return self.attend(k, v, padding)
        times = [time for group in temporal_ids for time in group]
        zeros = torch.zeros(self.embed_dim, device=x.device)
        times = torch.stack([zeros if time == -1 else self.temporal_pos_embed[time] for time in times])
        k = k + times.to(k.dtype)
        sizes = [len(group) for group in temporal_ids]
        k, v = ([part.transpose(0, 1).flatten(0, 1) for part in x.split(sizes, 1)] for x in (k, v))
        padding = [part.flatten() for part in padding.split(sizes)]
        pad = nn.utils.rnn.pad_sequence
        return self.attend(pad(k), pad(v), pad(padding, batch_first=True, padding_value=True))


def enlarged(module, seed=0):
    """The module with weights whose outputs are not small: default weights would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.2)
            elif "position_embedding" in name or name.endswith("query"):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
    return module.eval()


def models(version, seed=0, vision=None, resampling=None):
    """`vpm` and `resampler` of a version, small unless their sizes are given."""
    torch.manual_seed(seed)
    vpm = vision_transformer_25 if version == "2.5" else VisionTransformer
    resampler = Resampler45 if version == "4.5" else Resampler
    return enlarged(vpm(**(vision or {})), seed), enlarged(resampler(**(resampling or {})), seed + 1)


def slices_of(sizes, seed=0, patch=4):
    """Slices as the processor gives them, `[3, patch, patch * patches]` each, of some `(h, w)`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, patch, patch * h * w, generator=generator) for h, w in sizes]


def original(vpm, resampler, slices, sizes, temporal_ids=None):
    """Run slices as the whole model does, to `[slices, queries, dim]` or `[groups, queries, dim]`.

    With 2.5 slice by slice: its batches attend to padding.
    """
    sizes = torch.tensor(sizes, dtype=torch.int32)
    if isinstance(vpm, Idefics2VisionTransformer):
        with torch.no_grad():
            parts = [vpm(one[None]).last_hidden_state for one in slices]
            return torch.cat([resampler(x, size[None]) for x, size in zip(parts, sizes, strict=True)])
    longest = max(one.shape[-1] for one in slices)
    pixel_values = torch.stack([F.pad(one, (0, longest - one.shape[-1])) for one in slices])
    lengths = sizes[:, 0] * sizes[:, 1]
    mask = (torch.arange(int(lengths.max())) < lengths[:, None])[:, None]
    with torch.no_grad():
        x = vpm(pixel_values, patch_attention_mask=mask, tgt_sizes=sizes).last_hidden_state
        if temporal_ids is None:
            return resampler(x, sizes)
        return resampler(x, sizes, temporal_ids)


def blocks(vpm, resampler, slices, sizes):
    """Run every slice alone, with all that follows from the sizes computed ahead, as a graph can hold it."""
    device, dtype = slices[0].device, slices[0].dtype
    sizes = torch.tensor(sizes, dtype=torch.int32)
    longest = max(one.shape[-1] for one in slices)
    pixel_values = torch.stack([F.pad(one, (0, longest - one.shape[-1])) for one in slices])
    lengths = sizes[:, 0] * sizes[:, 1]
    mask = (torch.arange(int(lengths.max())) < lengths[:, None])[:, None]
    embeddings = vpm.embeddings
    ids = embeddings.position_ids((len(slices), int(lengths.max())), mask, sizes).to(device)
    padding = ~mask[:, 0].to(device)
    attention_mask = torch.zeros(padding.shape, dtype=dtype, device=device)
    attention_mask = attention_mask.masked_fill(padding, torch.finfo(dtype).min)[:, None, None]
    grids = [resampler.pos_embed[:h, :w].reshape(h * w, -1).to(dtype) for h, w in sizes.tolist()]
    positions = nn.utils.rnn.pad_sequence(grids)

    @torch.no_grad()
    def run():
        x = embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2) + embeddings.position_embedding(ids)
        for layer in vpm.encoder.layers:
            x = layer(x, attention_mask)
        v = resampler.ln_kv(resampler.kv_proj(vpm.post_layernorm(x))).permute(1, 0, 2)
        return resampler.attend(v + positions, v, padding)

    return run
