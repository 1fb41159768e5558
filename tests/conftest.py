"""One hypothesis profile for all tests: speed is measured elsewhere, and CI machines pause.

Without a GPU, Triton's kernels run in its interpreter, which must be said before triton is imported.
"""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("varlen_graphs", deadline=None)
settings.load_profile("varlen_graphs")
