"""Compilation of the kernel by NVRTC, NVIDIA's compiler library, which CUDA builds of torch bring along."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from varlen_graphs.attention.hopper import wgmma
from varlen_graphs.attention.hopper.config import Parameters


class KernelError(RuntimeError):
    """The kernel cannot be compiled or loaded."""


OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17")


def binary(config: Parameters) -> bytes:
    """Return the kernel as a cubin, from the folder of Triton's cache if it is there.

    Raises:
        KernelError: It does not compile.
    """
    import cuda.bindings
    from triton.runtime.cache import get_cache_manager

    code = source(config)
    compiler = torch.version.cuda, cuda.bindings.__version__  # to ask NVRTC itself, it would have to be loaded
    files = get_cache_manager(hashlib.sha256(repr((code, OPTIONS, compiler)).encode()).hexdigest())
    if (stored := files.get_file("attention.cubin")) is not None:
        return Path(stored).read_bytes()
    compiled = compile_source(code)
    files.put(compiled, "attention.cubin")
    return compiled


def source(config: Parameters) -> str:
    """Return the CUDA source of the kernel."""
    computing, copying = config.registers
    names = {
        "HEAD_DIM": config.head_dim,
        "AHEAD": config.ahead,
        "KEYS": config.keys,
        "GROUPS": config.groups,
        "STAGES": config.stages,
        "SWIZZLE": config.swizzle,
        "BFLOAT16": int(config.bfloat16),
        "CONSUMER_REGISTERS": computing,
        "PRODUCER_REGISTERS": copying,
    }
    definitions = "".join(f"#define {name} {value}\n" for name, value in names.items())
    products = wgmma.source(config.head_dim + config.ahead, config.keys, config.bfloat16)
    return definitions + products + Path(__file__).with_name("kernel.cu").read_text()


def checked(result: tuple[Any, ...], kind: type[RuntimeError] = RuntimeError) -> Any:
    """Return what a function of `cuda.bindings` returned.

    Raises:
        RuntimeError: It returned an error; of the class `kind`.
    """
    error, *values = result
    if int(error) != 0:
        raise kind(f"{type(error).__name__} {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


def compile_source(code: str) -> bytes:
    """Compile CUDA source for Hopper GPUs, and return the cubin.

    Raises:
        KernelError: It does not compile, and the compiler says why; or there is no NVRTC.
    """
    from cuda.bindings import nvrtc

    try:
        created = nvrtc.nvrtcCreateProgram(code.encode(), b"attention.cu", 0, [], [])
    except RuntimeError as missing:  # the library is loaded by its first function
        raise KernelError(str(missing)) from missing
    program = checked(created)
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), list(OPTIONS))
        if int(error) != 0:
            log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise KernelError(f"{error.name}: {log.decode(errors='replace').rstrip(chr(0))}")
        compiled = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, compiled))
        return compiled
    finally:
        nvrtc.nvrtcDestroyProgram(program)
