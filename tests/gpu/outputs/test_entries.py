"""Rows that become fewer, and prefix rows, on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus
from tests.support.prefixed import Prefixed, check_prefix, prefixed
from tests.support.shrinking import BUDGETS, SUBSAMPLING, Subsampling, check_subsampling

pytestmark = on_gpus()

DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])


@DTYPES
def test_the_padding_contract_holds_behind_a_convolutional_front_end(dtype, tolerance):
    module = Subsampling().to("cuda", dtype)
    encoder = vg.GraphedEncoder(module, BUDGETS, SUBSAMPLING, verify=vg.options.Verify(strict=True))
    check_subsampling(encoder, "cuda", dtype, tolerance)


@DTYPES
def test_the_padding_contract_holds_with_prefix_rows(dtype, tolerance):
    module = Prefixed().to("cuda", dtype)
    check_prefix(prefixed(backend="cuda", module=module), "cuda", dtype, tolerance)
