"""Verify on example calls that graphs reproduce the outputs of the module."""

from varlen_graphs.verify.given_calls import Verified

__all__ = ["Verified"]
