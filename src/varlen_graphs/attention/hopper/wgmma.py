"""CUDA source of the matrix products of a warpgroup (`wgmma.mma_async`), whose operands PTX wants one by one."""


def source(head_dim: int, keys: int, bfloat16: bool) -> str:
    """Return the functions `wgmma_scores` and `wgmma_values` that the kernel calls."""
    return _scores(keys, bfloat16) + _values(head_dim, bfloat16)


def _scores(keys: int, bfloat16: bool) -> str:
    """Scores [64, keys] of 16 channels; both matrices lie in shared memory with their channels contiguous."""
    count, kind = keys // 2, "bf16" if bfloat16 else "f16"
    return f"""
__device__ __forceinline__ void wgmma_scores(
    float (&d)[{count}], unsigned long long q, unsigned long long k, int accumulate) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{kind}.{kind} "
        "{{{_numbered(count)}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"
        : {_registers(count)} : "l"(q), "l"(k), "r"(accumulate));
}}
"""


def _values(head_dim: int, bfloat16: bool) -> str:
    """Output [64, head_dim] += weights [64, 16], in registers, times values [16, head_dim] in shared memory."""
    count, kind = head_dim // 2, "bf16" if bfloat16 else "f16"
    a = ", ".join(f"%{count + i}" for i in range(4))
    return f"""
__device__ __forceinline__ void wgmma_values(
    float (&d)[{count}], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long v) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{head_dim}k16.f32.{kind}.{kind} "
        "{{{_numbered(count)}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 1;"
        : {_registers(count)} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(v));
}}
"""


def _numbered(count: int) -> str:
    return ", ".join(f"%{i}" for i in range(count))


def _registers(count: int) -> str:
    return ", ".join(f'"+f"(d[{i}])' for i in range(count))
