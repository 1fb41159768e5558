"""All towers and modules of the corpus, by name."""

from tests.doctor.corpus import across_rows, on_host, others, vision, with_state
from tests.doctor.corpus.cases import CASES

__all__ = ["CASES", "MODULES", "TOWERS"]

MODULES = (on_host, across_rows, with_state)
"""Files of modules; importing them fills `CASES`."""

TOWERS = vision.TOWERS | others.TOWERS
