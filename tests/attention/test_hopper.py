"""`attention.hopper`, for long segments, as far as machines without such a GPU can tell: see tests/gpu/attention."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen_graphs as vg
from tests.support.segments import boundaries, naive_attention, random_qkv, relative, unaligned
from varlen_graphs.attention.hopper import compile, reference
from varlen_graphs.attention.hopper.config import HEAD_DIMS, parameters, tile_rows, times
from varlen_graphs.attention.inputs import AttentionInputs
from varlen_graphs.attention.tile_schedule import reference as schedule_reference

CONFIGS = [
    parameters(head_dim, block, dtype, ahead)
    for head_dim, block, dtype, ahead in (
        (64, 256, torch.bfloat16, 0), (64, 192, torch.bfloat16, 0), (64, 128, torch.float16, 0),
        (72, 192, torch.float16, 0),
        (72, 128, torch.bfloat16, 8), (88, 192, torch.bfloat16, 8), (96, 192, torch.bfloat16, 0),
        (120, 128, torch.bfloat16, 8), (128, 128, torch.bfloat16, 0),
    )
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_kernel_compiles_and_its_registers_suffice(config):
    pytest.importorskip("cuda.bindings", reason="needs NVRTC, which comes with CUDA builds of torch")
    from cuda.bindings import nvrtc

    program = compile.checked(nvrtc.nvrtcCreateProgram(compile.source(config).encode(), b"attention.cu", 0, [], []))
    options = [*compile.OPTIONS, b"--ptxas-options=-v"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytes(compile.checked(nvrtc.nvrtcGetProgramLogSize(program)))
    nvrtc.nvrtcGetProgramLog(program, log)
    log = log.decode()
    assert int(error) == 0, log
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert "wgmma" not in log  # products that wait for each other, for want of registers
    assert config.shared_memory <= 227 * 1024


def test_a_source_that_does_not_compile_says_why(monkeypatch):
    pytest.importorskip("cuda.bindings", reason="needs NVRTC, which comes with CUDA builds of torch")
    with pytest.raises(RuntimeError, match=r"NVRTC_ERROR_COMPILATION: attention.cu\(1\): error: "):
        compile.compile_source("nonsense;")


def test_without_nvrtc_there_is_no_kernel(monkeypatch):
    """What a backend without its kernel does is in tests/gpu/attention/test_hopper.py."""
    pytest.importorskip("cuda.bindings", reason="needs NVRTC, which comes with CUDA builds of torch")
    from cuda.bindings import nvrtc

    def missing(*arguments):
        raise RuntimeError("Failure finding libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", missing)
    with pytest.raises(compile.KernelError, match=r"Failure finding libnvrtc.so.13"):
        compile.compile_source("")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dimension_fits_into_a_multiprocessor(head_dim):
    for block in times(head_dim):
        for ahead in (0, 8) if head_dim % 16 else (0,):
            config = parameters(head_dim, block, torch.bfloat16, ahead)
            assert config.shared_memory <= 227 * 1024
            computing, copying = config.registers
            at_first = (1 << 16) // (128 * (config.groups + 1)) // 8 * 8
            assert config.groups * computing + copying <= at_first * (config.groups + 1)
            assert config.keys % 16 == 0


@pytest.mark.parametrize(
    ("head_dim", "rows", "longest", "expected"),
    [
        (72, 1764, 1764, 128),
        (72, 2500, 2500, 192),
        (72, 7056, 7056, 192),
        (72, 2000, 2000, 128),
        (72, 14_112, 1764, 192),
        (64, 1000, 1000, 128),
        (64, 3136, 3136, 192),
        (64, 4096, 4096, 256),
        (64, 8160, 8160, 256),
        (64, 16_384, 1024, 256),
        (64, 15_680, 3136, 192),
        (80, 1300, 1300, 192),
        (128, 7056, 7056, 128),
        (72, 484, 8192, 128),
    ],
)
def test_tiles_are_those_that_were_measured_to_be_faster(head_dim, rows, longest, expected):
    assert tile_rows(head_dim, 16, rows, longest) == expected


lengths_of_segments = st.lists(st.sampled_from([0, 1, 5, 9, 10, 11, 30]), min_size=1, max_size=8)


@given(lengths_of_segments, st.integers(0, 9), st.sampled_from([4, 64]), st.booleans())
def test_the_reference_attends_within_long_segments_alone(lengths, padding, block, grouped):
    q, k, v = random_qkv(lengths, heads=4, heads_k=2 if grouped else 4, padding=padding)
    cu_seqlens = boundaries(lengths)
    tiles = schedule_reference.tile_schedule(cu_seqlens, cu_seqlens, q.shape[0], block, 10)
    out = reference.attention(q, k, v, tiles, block, 0.3)
    is_long = torch.tensor([n >= 10 for n in [*lengths, 0]]).repeat_interleave(torch.tensor([*lengths, padding]))
    expected = naive_attention(q, k, v, lengths, lengths, 0.3)
    assert relative(out[is_long], expected[is_long]) <= 2e-6
    assert not out[~is_long].any()


def test_what_kernels_with_vector_loads_take():
    def is_aligned(*tensors):
        cu_seqlens = boundaries([3])
        return AttentionInputs(*tensors, cu_seqlens, cu_seqlens, None, 0, None, 0, 3, 3, 1.0, -1, -1).is_aligned

    q, k, v = random_qkv([3], head_dim=8, dtype=torch.bfloat16)
    assert is_aligned(q, k, v)
    assert is_aligned(q, k[:, :1], v[:, :1].expand(-1, 2, -1))
    assert not is_aligned(q, unaligned(k), v)
    assert not is_aligned(q, k, random_qkv([3], head_dim=12, dtype=torch.bfloat16)[2])
    assert not is_aligned(q, k, v.transpose(1, 2).contiguous().transpose(1, 2))


def test_other_devices_are_refused_with_what_is_needed():
    q, k, v = random_qkv([1100], head_dim=64, dtype=torch.bfloat16)
    with pytest.raises(
        vg.errors.InputError, match=re.escape("on a GPU of compute capability 9.0, head_dim a multiple of 8")
    ):
        vg.varlen_attention(q, k, v, boundaries([1100]), 1100, backend="hopper")
    with pytest.raises(vg.errors.InputError, match="backend 'hopper' got a bias, a window, a causal mask"):
        vg.varlen_attention(q, k, v, boundaries([1100]), 1100, backend="hopper", causal=True)
