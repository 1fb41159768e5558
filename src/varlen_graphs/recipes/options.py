"""Options of the encoders that recipes make."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from varlen_graphs.verify.options import Verify


def of_recipe(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with which the tower itself answers where the recipe's forward computes something else.

    Its caller asked for the tower, so there is no doubt which of the two is right.
    """
    verify = options.get("verify", 0)
    own = verify if isinstance(verify, Verify) else Verify(verify)
    return {**options, "verify": dataclasses.replace(own, mismatch="module")}
