"""The declaration of a module, and calls by it."""

from varlen_graphs.declaration.buffer_spec import BufferSpec

__all__ = ["BufferSpec"]
