"""Replacement of the memset nodes of captured graphs by kernel nodes.

A graph of kernels alone launches in about 5 us. With other nodes among them a launch takes 80 to 190 us of host time,
and each such node stalls the GPU (docs/benchmarks.md). cuBLAS zeroes a counter before many large matrix products, which
a capture records as a memset.
"""

import ctypes
import weakref
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

from varlen_graphs.capture.driver import begin_capture, call_driver, driver, end_capture
from varlen_graphs.capture.memory import device_bytes

KERNEL, MEMSET = 0, 2
"""Node types, as numbered by the CUDA driver."""

ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Element dtype by size in bytes."""


class _MemsetParams(ctypes.Structure):
    """`CUDA_MEMSET_NODE_PARAMS` of the CUDA driver."""

    _fields_ = (
        ("address", c_uint64), ("pitch", c_size_t), ("value", c_uint), ("element_bytes", c_uint), ("width", c_size_t),
        ("height", c_size_t),
    )  # fmt: skip


class _KernelParams(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v2` of the CUDA driver."""

    _fields_ = (
        ("function", c_void_p), ("grid_and_block", c_uint * 6), ("shared_bytes", c_uint), ("arguments", c_void_p),
        ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p),
    )  # fmt: skip


def memsets_to_kernels(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Replace the memset nodes of a graph that was captured with `keep_graph=True` and is not instantiated yet.

    Memsets of several rows (`cudaMemset2D`), and those with a programmatic dependency, stay.

    Args:
        graph: The graph.
        stream: Stream on which to capture the kernels; not the default stream.
    """
    handle = c_void_p(graph.raw_cuda_graph())
    fills: dict[bytes, _FillKernel] = {}
    for node in _nodes("cuGraphGetNodes", handle):
        if _node_type(node) == MEMSET:
            memset = _MemsetParams()
            call_driver("cuGraphMemsetNodeGetParams", node, byref(memset))
            if memset.height == 1 and not _has_programmatic_edge(node):
                if bytes(memset) not in fills:
                    fills[bytes(memset)] = _FillKernel(memset, stream)
                fills[bytes(memset)].replace(node, handle)


def node_types(graph: torch.cuda.CUDAGraph) -> list[int]:
    """Return the type of every node of a graph that was captured with `keep_graph=True`."""
    return [_node_type(node) for node in _nodes("cuGraphGetNodes", c_void_p(graph.raw_cuda_graph()))]


class _FillKernel:
    """Torch's fill kernel, with the arguments of a memset."""

    def __init__(self, memset: _MemsetParams, stream: torch.cuda.Stream) -> None:
        memory = device_bytes(memset.address, memset.width * memset.element_bytes)
        memory = memory.view(ELEMENTS[memset.element_bytes])
        value = torch.tensor([memset.value], device="cpu").to(memory.dtype).item()  # keeps the low bytes
        with torch.cuda.stream(stream):
            begin_capture(stream)
            try:
                memory.fill_(value)
            finally:
                graph = end_capture(stream)
                weakref.finalize(self, call_driver, "cuGraphDestroy", graph)  # it keeps the kernel's arguments alive
        (kernel,) = _nodes("cuGraphGetNodes", graph)
        self._kernel = _KernelParams()
        call_driver("cuGraphKernelNodeGetParams_v2", kernel, byref(self._kernel))

    def replace(self, node: c_void_p, graph: c_void_p) -> None:
        """Replace a node by one of this kernel."""
        before, after = _nodes("cuGraphNodeGetDependencies", node), _nodes("cuGraphNodeGetDependentNodes", node)
        new = c_void_p()
        call_driver(
            "cuGraphAddKernelNode_v2", byref(new), graph, _array(before), c_size_t(len(before)), byref(self._kernel)
        )
        call_driver("cuGraphAddDependencies", graph, _array([new] * len(after)), _array(after), c_size_t(len(after)))
        call_driver("cuGraphDestroyNode", node)


def _node_type(node: c_void_p) -> int:
    kind = c_int()
    call_driver("cuGraphNodeGetType", node, byref(kind))
    return kind.value


def _has_programmatic_edge(node: c_void_p) -> bool:
    """Return True if an edge of a node has a programmatic dependency; the driver refuses to list such edges."""
    lists = (driver().cuGraphNodeGetDependencies, driver().cuGraphNodeGetDependentNodes)
    return any(list_nodes(node, None, byref(c_size_t())) for list_nodes in lists)


def _nodes(function: str, of: c_void_p) -> list[c_void_p]:
    """Return the nodes that a driver function lists."""
    count = c_size_t()
    call_driver(function, of, None, byref(count))
    nodes = (c_void_p * count.value)()
    if count.value:
        call_driver(function, of, nodes, byref(count))
    return [c_void_p(node) for node in nodes]


def _array(nodes: list[c_void_p]) -> Any:
    return (c_void_p * len(nodes))(*nodes)
