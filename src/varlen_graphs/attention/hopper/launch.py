"""Launch of the kernel."""

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from varlen_graphs.attention.device import multiprocessors
from varlen_graphs.attention.hopper import reference
from varlen_graphs.attention.hopper.compile import KernelError, binary, checked
from varlen_graphs.attention.hopper.config import Parameters, parameters
from varlen_graphs.attention.tile_schedule.op import tile_schedule

LOG2E = 1.4426950408889634
SECTOR = 32
"""Bytes of a memory sector, the unit of a load."""

_failures: dict[tuple[Parameters, torch.device], str | None] = {}


def attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, block: int, scale: float, programs: int | None = None
) -> Tensor:
    """Compute `reference.attention`, but leave rows of other segments as they are in new memory.

    One launch on the current stream; allocates the output. Reads the number of tiles on the device. There must be
    rows, `AttentionInputs.is_aligned` must hold, and `failure` must have returned `None`. `programs` share the tiles:
    if `None`, one for each multiprocessor. The output is the same, bit for bit.
    """
    from cuda.bindings import driver

    (rows, heads, head_dim), device = q.shape, q.device.index
    if not int(checked(driver.cuCtxGetCurrent())):  # a thread that has not used CUDA yet
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    chosen = parameters_of(k, v, block)
    together = 2 if chosen.ahead else 1
    maps = _tensor_map(q, 64, 1, chosen), *(_tensor_map(x, chosen.keys, together, chosen) for x in (k, v))
    values = (*maps, out.data_ptr(), tiles.data_ptr(), heads, heads // k.shape[1], k.shape[0], scale * LOG2E)
    types = (*[None] * 3, *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 3, ctypes.c_float)
    grid, threads = (programs or multiprocessors(q.device), 1, 1), (128 * (1 + chosen.groups), 1, 1)
    kernel, stream = _kernel(chosen, device), torch.cuda.current_stream(q.device).cuda_stream
    checked(driver.cuLaunchKernel(kernel, *grid, *threads, chosen.shared_memory, stream, (values, types), 0))
    return out


def parameters_of(k: Tensor, v: Tensor, block: int) -> Parameters:
    """Return the parameters of the kernel for these keys and values, and tiles of `block` query rows."""
    return parameters(k.shape[2], block, k.dtype, 8 if _in_pairs(k) and _in_pairs(v) else 0)


def failure(chosen: Parameters, device: torch.device, compiles: bool) -> str | None:
    """Return why a kernel cannot be used on a device, or `None`: it compiles and agrees with its reference.

    Once per kernel and device, and only if `compiles`, it compiles, allocates and syncs with the device, which must be
    the current one; but never while a graph is captured.
    """
    key = chosen, device
    if key not in _failures:
        if not compiles or torch.cuda.is_current_stream_capturing():
            return "a kernel that is not compiled yet"
        _failures[key] = _try(chosen, device)
    return _failures[key]


def _try(chosen: Parameters, device: torch.device) -> str | None:
    try:
        agrees = _agrees(chosen, device)
    except (
        ImportError,
        OSError,
        KernelError,
    ) as error:  # others, such as those of memory, say nothing about the kernel
        return f"a kernel that cannot be compiled or loaded ({error})"
    return None if agrees else f"a kernel whose results are wrong on {device} ({chosen})"


def _agrees(chosen: Parameters, device: torch.device) -> bool:
    block, heads, head_dim = 64 * chosen.groups, 2 if chosen.ahead else 1, chosen.head_dim
    dtype = torch.bfloat16 if chosen.bfloat16 else torch.float16
    lengths = 600, 2 * block - 1, 3  # several blocks of keys, tiles that are not full, a segment that is not long
    rows = sum(lengths) + 96  # padding
    # On the CPU, where first uses of operators take no time.
    wave = torch.arange(rows * 3 * heads * head_dim, dtype=torch.float64, device="cpu").square().mul(0.37).sin()
    qkv = (2 * wave).to(device, dtype).view(rows, 3, heads, head_dim)
    qkv[sum(lengths) :] = torch.nan
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    tiles, (q, k, v) = tile_schedule(cu_seqlens, cu_seqlens, rows, block, 4), qkv.unbind(1)
    arguments, long = (q, k, v, tiles, block, head_dim**-0.5), slice(sum(lengths[:2]))
    expected = reference.attention(*arguments)[long].cpu().float()
    # So few programs take whole tiles, and by some of these numbers parts of what is left over.
    outs = (attention(*arguments, programs=programs)[long].cpu().float() for programs in (4, 5, 8, 9, 10))
    return all(bool((out - expected).norm() < 0.01 * expected.norm()) for out in outs)


def _in_pairs(x: Tensor) -> bool:
    """Return True if every odd head begins in the middle of a memory sector: pairs of heads are loaded faster."""
    rows, heads, _ = (stride * x.element_size() % SECTOR for stride in x.stride())
    alternate = heads == SECTOR // 2 and rows == x.data_ptr() % SECTOR == 0
    return alternate and x.stride(1) == x.shape[2] and x.shape[1] % 2 == 0


def _tensor_map(x: Tensor, rows: int, together: int, chosen: Parameters) -> Any:
    """Describe `x` for copies of `rows` rows of one head, or of one of `together` heads side by side."""
    sizes = x.shape[2] * together, x.shape[1] // together, x.shape[0]
    steps = x.stride(1) * together * x.element_size(), x.stride(0) * x.element_size()
    box = chosen.swizzle // x.element_size(), 1, rows
    return _encoded(x.data_ptr(), sizes, steps, box, chosen.swizzle, chosen.bfloat16)


@lru_cache(maxsize=256)  # layers find their tensors at the same few addresses
def _encoded(
    address: int, sizes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...], swizzle: int, bfloat16: bool
) -> Any:
    from cuda.bindings import driver

    kind = "BFLOAT16" if bfloat16 else "FLOAT16"
    return checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(step) for step in steps],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1) for _ in sizes],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}B"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


@cache
def _kernel(chosen: Parameters, device: int) -> Any:
    """Return the kernel, loaded on a device, which must be the current one."""
    from cuda.bindings import driver

    result = driver.cuModuleLoadData(binary(chosen))
    if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory: no room for the kernel {chosen}")
    module = checked(result, KernelError)
    kernel = checked(driver.cuModuleGetFunction(module, b"attention"), KernelError)
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(kernel, limit, chosen.shared_memory), KernelError)
    return kernel
