"""The device of the servers beside this file, and the end of a process whose GPU has failed."""

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def end_if_broken():
    """End this process, for its server to replace it, if CUDA has failed.

    After an assertion on the GPU, or an illegal access, every use of CUDA in the process raises, for good.
    """
    try:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)  # another end might wait for the GPU
