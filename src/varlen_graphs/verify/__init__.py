"""Prove on example calls that graphs give what the module gives."""

from varlen_graphs.verify.verifier import Verified

__all__ = [
    "Verified",
]
