"""Pix2Struct and Kosmos 2.5 on real CUDA graphs."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.gpu import on_gpus

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support.patches import BUDGETS, CLASSES, check_patches, patches_tower

pytestmark = on_gpus()


@pytest.mark.parametrize("kind", CLASSES)
def test_outputs_are_those_of_the_tower_padding_included(kind):
    tower = patches_tower(kind).cuda()
    encoder = vg.recipes.flattened_patches(tower, BUDGETS, backend="cuda", verify=vg.options.Verify(strict=True))
    check_patches(encoder, torch.device("cuda"), 1e-4)
