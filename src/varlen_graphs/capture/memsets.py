"""Memsets of captured graphs, turned into kernels.

A graph of kernels alone is launched in about 5 us. With other nodes among them a launch takes 80 to 190 us of the host,
and each of them holds the GPU up (docs/benchmarks.md). cuBLAS zeroes a counter ahead of many large matrix products,
which a capture records as a memset.
"""

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

from varlen_graphs.capture.memory import device_bytes

KERNEL, MEMSET = 0, 2
"""Types of nodes, as the CUDA driver numbers them."""

ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What is set, by its bytes."""


class _Memset(ctypes.Structure):
    """`CUDA_MEMSET_NODE_PARAMS` of the CUDA driver."""

    _fields_ = (
        ("address", c_uint64), ("pitch", c_size_t), ("value", c_uint), ("element_bytes", c_uint), ("width", c_size_t),
        ("height", c_size_t),
    )  # fmt: skip


class _Kernel(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v2` of the CUDA driver."""

    _fields_ = (
        ("function", c_void_p), ("grid_and_block", c_uint * 6), ("shared_bytes", c_uint), ("arguments", c_void_p),
        ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p),
    )  # fmt: skip


def memsets_to_kernels(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Replace the memsets of a graph that was captured with `keep_graph=True` and is not instantiated yet.

    Those of several rows (`cudaMemset2D`) stay, and those next to a programmatic dependency.

    Args:
        graph: The graph.
        stream: Any but the default stream, to capture the kernels on.
    """
    handle = c_void_p(graph.raw_cuda_graph())
    fills: dict[bytes, _Fill] = {}
    for node in _nodes("cuGraphGetNodes", handle):
        if _type(node) == MEMSET:
            memset = _Memset()
            _do("cuGraphMemsetNodeGetParams", node, byref(memset))
            if memset.height == 1 and not _programmatic(node):
                if bytes(memset) not in fills:
                    fills[bytes(memset)] = _Fill(memset, stream)
                fills[bytes(memset)].replace(node, handle)


def node_types(graph: torch.cuda.CUDAGraph) -> list[int]:
    """The type of every node of a graph that was captured with `keep_graph=True`."""
    return [_type(node) for node in _nodes("cuGraphGetNodes", c_void_p(graph.raw_cuda_graph()))]


class _Fill:
    """Torch's own kernel that does what a memset does."""

    def __init__(self, memset: _Memset, stream: torch.cuda.Stream) -> None:
        memory = device_bytes(memset.address, memset.width * memset.element_bytes)
        memory = memory.view(ELEMENTS[memset.element_bytes])
        value = torch.tensor([memset.value]).to(memory.dtype).item()  # its low bytes
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # holds the arguments of the kernel
        with torch.cuda.stream(stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                memory.fill_(value)
            finally:
                self._graph.capture_end()
        (kernel,) = _nodes("cuGraphGetNodes", c_void_p(self._graph.raw_cuda_graph()))
        self._kernel = _Kernel()
        _do("cuGraphKernelNodeGetParams_v2", kernel, byref(self._kernel))

    def replace(self, node: c_void_p, graph: c_void_p) -> None:
        """Put a node of this kernel in the place of another node."""
        before, after = _nodes("cuGraphNodeGetDependencies", node), _nodes("cuGraphNodeGetDependentNodes", node)
        new = c_void_p()
        _do("cuGraphAddKernelNode_v2", byref(new), graph, _array(before), c_size_t(len(before)), byref(self._kernel))
        _do("cuGraphAddDependencies", graph, _array([new] * len(after)), _array(after), c_size_t(len(after)))
        _do("cuGraphDestroyNode", node)


def _type(node: c_void_p) -> int:
    kind = c_int()
    _do("cuGraphNodeGetType", node, byref(kind))
    return kind.value


def _programmatic(node: c_void_p) -> bool:
    """Whether an edge of a node says more than that one waits for the other: the driver does not list it then."""
    lists = (_driver().cuGraphNodeGetDependencies, _driver().cuGraphNodeGetDependentNodes)
    return any(list_nodes(node, None, byref(c_size_t())) for list_nodes in lists)


def _nodes(function: str, of: c_void_p) -> list[c_void_p]:
    """The nodes that a function lists."""
    count = c_size_t()
    _do(function, of, None, byref(count))
    nodes = (c_void_p * count.value)()
    if count.value:
        _do(function, of, nodes, byref(count))
    return [c_void_p(node) for node in nodes]


def _array(nodes: list[c_void_p]) -> Any:
    return (c_void_p * len(nodes))(*nodes)


def _do(function: str, *arguments: Any) -> None:
    error = getattr(_driver(), function)(*arguments)
    if error:
        raise RuntimeError(f"{function} failed with CUDA error {error}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
