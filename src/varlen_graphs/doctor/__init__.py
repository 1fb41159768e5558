"""Why a module cannot be captured, and what a capture of it would freeze: every offender at once, without a GPU."""

from varlen_graphs.doctor.diagnose import diagnose
from varlen_graphs.doctor.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
