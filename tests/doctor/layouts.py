"""Example calls for the doctor, of ones and the lengths of their items."""

import torch


def layouts(*lengths):
    """Return a call for each list of lengths."""
    return [{"x": torch.ones(sum(own), 4), "lengths": torch.tensor(own)} for own in lengths]


TWO = layouts([3, 5], [2, 2, 4])
"""As many rows, and other items."""
