"""Random encoders for some minutes: `python -m tests.soak --minutes 10`.

A failure is shrunk, printed as a case, and run again by `python -m tests.soak --case "Case(...)"`.
"""

import argparse
import random
import sys
import time
import warnings
from collections import Counter

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity

import varlen_graphs as vg
from tests.soak import parts
from tests.soak.cases import Call, Case, cases, wrong_cases
from tests.soak.check import check_case, check_wrong_case
from tests.soak.flaws import Flaw

ROUND = 100
"""Cases tried in a row, between two looks at the clock."""


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=3, help="when to stop")
    arguments.add_argument("--seed", type=int, help="the seed of the first round; later rounds count on from it")
    arguments.add_argument("--case", help="run this case alone")
    arguments.add_argument("--wrong", action="store_true", help="wrong encoders, which must not answer with graphs")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check, drawn = (check_wrong_case, wrong_cases()) if options.wrong else (check_case, cases())
    if options.wrong:
        warnings.simplefilter("ignore")  # each is warned of
    if options.case:
        check(eval(options.case, vars(parts) | vars(vg) | {"Case": Case, "Call": Call, "Flaw": Flaw}), device)
        return print("passed")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    end = time.monotonic() + 60 * options.minutes
    count, latest = Counter(), None

    @hypothesis.settings(
        max_examples=ROUND, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet, print_blob=False,
    )  # fmt: skip
    @hypothesis.given(drawn)
    def one_round(case):
        nonlocal latest
        latest = case
        stats = check(case, device)
        count.update(cases=1, calls=stats.calls, replays=stats.replays.total(), eager=stats.eager.total())

    while time.monotonic() < end:
        try:
            hypothesis.seed(seed)(one_round)()
        except Exception as error:  # whatever it is, it is the find
            sys.exit(f"{type(error).__name__}: {error}\nround --seed {seed}, the smallest case found:\n{latest!r}")
        seed += 1
        counts = ", ".join(f"{number} {name}" for name, number in count.items())
        print(f"{counts} on {device}, no failure; next --seed {seed}", flush=True)
    return None


if __name__ == "__main__":
    main()
