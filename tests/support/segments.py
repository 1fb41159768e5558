"""Packed segments for tests of attention, and the plainest possible attention over them."""

import torch


def boundaries(lengths, empty=0, device="cpu"):
    """Return `cu_seqlens` of segments, and of `empty` more at the end."""
    ends = torch.tensor([0, *lengths, *[0] * empty]).cumsum(0)
    return ends.int().to(device)


def random_qkv(lengths, lengths_k=None, heads=2, heads_k=None, head_dim=8, padding=0, dtype=torch.float32, seed=0):
    """Return queries, keys and values of segments, with `padding` rows after the last one."""
    generator = torch.Generator().manual_seed(seed)
    lengths_k = lengths if lengths_k is None else lengths_k
    sizes = [(lengths, heads), (lengths_k, heads_k or heads), (lengths_k, heads_k or heads)]
    return [torch.randn(sum(n) + padding, h, head_dim, generator=generator).to(dtype) for n, h in sizes]


def random_bias(heads, reach, dtype=torch.float32, device="cpu"):
    """Return biases large enough to count, or `None` without a reach."""
    if reach is None:
        return None
    generator = torch.Generator().manual_seed(reach)
    return (3 * torch.randn(heads, 2 * reach + 1, generator=generator)).to(device, dtype)


def naive_attention(q, k, v, lengths, lengths_k, scale, left=-1, right=-1, bias=None):
    """Attend head by head and segment by segment, in float64; zeros in all other rows, and where a query sees no key."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    start = start_k = 0
    for length, length_k in zip(lengths, lengths_k, strict=True):
        place = (
            torch.arange(length, device=q.device)[:, None] + length_k - length
        )  # the last is level with the last key
        key = torch.arange(length_k, device=q.device)
        hidden = torch.zeros(length, length_k, dtype=torch.bool, device=q.device)
        if left >= 0:
            hidden |= key < place - left
        if right >= 0:
            hidden |= key > place + right
        for head in range(q.shape[1]):
            head_k = head // (q.shape[1] // k.shape[1])
            queries = q[start : start + length, head].double()
            keys, values = (x[start_k : start_k + length_k, head_k].double() for x in (k, v))
            scores = queries @ keys.T * scale
            if bias is not None:
                reach = bias.shape[1] // 2
                scores += bias[head].double()[(key - place).clamp(-reach, reach) + reach]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[start : start + length, head] = weights.nan_to_num() @ values
        start, start_k = start + length, start_k + length_k
    return out


def relative(got, expected):
    """Return the relative L2 error; infinite where something is not finite, zero against zeros."""
    error, size = (got.double() - expected.double()).norm().item(), expected.double().norm().item()
    return float("inf") if error != error else error / (size or 1)


def heads_first(x):
    """Return the same values with heads in the outer dimension of memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def between_garbage(x):
    """Return the same values in a wider buffer that holds NaN beside them."""
    wide = torch.full((x.shape[0] + 1, x.shape[1], x.shape[2] + 8), torch.nan, dtype=x.dtype, device=x.device)
    wide[:-1, :, : x.shape[2]] = x
    return wide[:-1, :, : x.shape[2]]


def unaligned(x):
    """Return the same values one element after an aligned address."""
    flat = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)
