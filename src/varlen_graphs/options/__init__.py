"""Options of an encoder, and the pool that encoders may share."""

from varlen_graphs.capture.pool import Pool
from varlen_graphs.options.capture import Capture
from varlen_graphs.options.gpu_layouts import GpuLayouts
from varlen_graphs.options.verify import Verify

__all__ = ["Capture", "GpuLayouts", "Pool", "Verify"]
