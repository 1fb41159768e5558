"""Import before an engine: torchvision, whose kernels a CPU build of torch may not load, asks for these operators."""

import torch

for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
