"""All towers and modules of the corpus, by name."""

from tests.doctor.corpus import (
    across_rows,
    held_out,
    held_out_again,
    held_out_towers,
    on_host,
    others,
    vision,
    with_state,
)
from tests.doctor.corpus.cases import CASES

__all__ = ["CASES", "MODULES", "TOWERS"]

MODULES = (on_host, across_rows, with_state, held_out, held_out_again)
"""Files of modules; importing them fills `CASES`."""

TOWERS = vision.TOWERS | others.TOWERS | held_out_towers.TOWERS
