"""`resample`: the reference, the operator, and the kernel in Triton's interpreter, or on a GPU where there is one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen_graphs.kernels.resample import reference
from varlen_graphs.kernels.resample.op import resample


def filters(seed, size, resized, taps):
    """Weights of either sign that add up to one in 8 binary places."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, size, (resized, 1), generator=generator)
    weights = torch.randint(-40, 80, (resized, taps), generator=generator)
    weights = torch.where(first + torch.arange(taps) < size, weights, 0)
    weights[:, 0] += 256 - weights.sum(1)
    return torch.cat([first, weights], 1).int()


def test_pixels_are_weighed_and_rounded_to_bytes():
    pixels = torch.tensor([[0], [100], [201], [255]], dtype=torch.uint8)
    halves = torch.tensor(
        [[0, 128, 128], [1, 128, 128], [3, 256, 0], [2, -256, 512], [2, 512, -256]], dtype=torch.int32
    )
    got = reference.resample(pixels[None], halves, 8)
    assert got.flatten().tolist() == [50, 151, 255, 255, 147]  # 150.5 is rounded up, and 309 is white
    assert reference.resample(pixels[None], torch.tensor([[2, 512, -512]], dtype=torch.int32), 8).item() == 0


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 700]), st.integers(1, 4),
    st.integers(0, 9),
)  # fmt: skip
def test_the_kernel_makes_the_bytes_of_the_reference(outer, size, resized, inner, taps, seed):
    from varlen_graphs.kernels.resample import triton

    generator, device = torch.Generator().manual_seed(seed), "cuda" if torch.cuda.is_available() else "cpu"
    pixels = torch.randint(0, 256, (outer, size, inner), generator=generator, dtype=torch.uint8).to(device)
    one = filters(seed, size, resized, taps).to(device)
    assert torch.equal(triton.resample(pixels, one, 8), reference.resample(pixels, one, 8))
    turned = pixels.transpose(0, 2)  # not contiguous
    assert torch.equal(triton.resample(turned, one, 8), reference.resample(turned, one, 8))


def test_a_result_of_more_blocks_than_a_grid_has_takes_larger_ones(monkeypatch):
    from varlen_graphs.kernels.resample import triton

    monkeypatch.setattr(triton, "MOST_BLOCKS", 2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pixels = torch.randint(0, 256, (1, 4, 1500), dtype=torch.uint8).to(device)
    one = filters(0, 4, 3, 2).to(device)
    assert torch.equal(triton.resample(pixels, one, 8), reference.resample(pixels, one, 8))


def test_the_operator_is_sound_for_the_compiler():
    pixels = torch.randint(0, 256, (2, 5, 3), dtype=torch.uint8)
    torch.library.opcheck(resample, (pixels, filters(0, 5, 4, 2), 8))
