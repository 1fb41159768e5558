"""The doctor: finds every line that prevents a capture of a module, or that a graph would freeze, without a GPU."""

from varlen_graphs.doctor.diagnose import diagnose
from varlen_graphs.doctor.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
