"""Graphs of kernels alone: what was captured as a memset does the same as a kernel."""

import ctypes

import torch
from torch import nn

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from varlen_graphs.capture.memsets import KERNEL, MEMSET, memsets_to_kernels, node_types

pytestmark = on_gpus()


def memset(tensor, value, bits, pitch=None):
    """Queue a memset of the driver on the current stream: of all of a tensor, or of each row of a part of one."""
    size = ctypes.c_size_t
    driver, where = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(tensor.data_ptr())
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if pitch is None:
        error = getattr(driver, f"cuMemsetD{bits}Async")(where, ctypes.c_uint(value), size(tensor.numel()), stream)
    else:
        function = getattr(driver, f"cuMemsetD2D{bits}Async")
        error = function(where, size(pitch), ctypes.c_uint(value), *map(size, reversed(tensor.shape)), stream)
    assert error == 0


def capture_graph(run):
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        output = run()
    return graph, output, stream


def test_memsets_become_kernels_that_do_the_same():
    small, words, doubles = (
        torch.zeros(n, dtype=d, device="cuda") for n, d in ((7, torch.uint8), (33, torch.int16), (1, torch.int32))
    )
    source = torch.ones(64, device="cuda")

    def run():
        source.add_(1)
        memset(small[1:4], 200, 8)
        memset(words, 0xFFFE, 16)
        product = source * 2
        memset(doubles, 0xFFFFFFFD, 32)
        memset(small[1:2], 3, 8)
        return product + doubles

    graph, output, stream = capture_graph(run)
    assert node_types(graph).count(MEMSET) == 4
    memsets_to_kernels(graph, stream)
    assert set(node_types(graph)) == {KERNEL}
    graph.instantiate()
    for replay in range(2, 4):
        doubles.fill_(9)
        graph.replay()
        assert small.tolist() == [0, 3, 200, 200, 0, 0, 0]
        assert set(words.tolist()) == {-2}
        assert set(output.tolist()) == {2.0 * replay - 3}


def test_a_memset_of_several_rows_stays():
    table = torch.zeros(4, 16, dtype=torch.uint8, device="cuda")
    graph, _, stream = capture_graph(lambda: memset(table[:, 2:5], 7, 8, pitch=16))
    memsets_to_kernels(graph, stream)
    assert node_types(graph) == [MEMSET]
    graph.instantiate()
    graph.replay()
    assert table.sum(0).tolist() == [0, 0, 28, 28, 28, *[0] * 11]


def test_an_encoder_whose_module_uses_memsets():
    class Encoder(nn.Linear):
        def forward(self, x):
            total = torch.ones(1, dtype=torch.int32, device=x.device)
            if x.is_cuda:
                memset(total, 0x40000000, 32)  # 2.0
            return super().forward(x) * total.view(torch.float32)

    module = Encoder(64, 64).cuda()
    encoder = vg.GraphedEncoder(module, [64, 128], vg.BufferSpec(vg.inputs.Rows("x", shape=(64,)), vg.Lengths()))
    for rows in (5, 64, 100):
        x = torch.randn(rows, 64, device="cuda")
        torch.testing.assert_close(encoder(x, lengths=[rows]), 2 * nn.functional.linear(x, module.weight, module.bias))
    (graphs,) = encoder.executor.store.sets
    assert {kind for graph in graphs for kind in node_types(graph.cuda_graph)} == {KERNEL}
