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
from tests.soak.check import check_case, check_claim, check_exact_case, check_wrong_case
from tests.soak.claims import Change, Claim, claims
from tests.soak.flaws import Flaw
from tests.soak.kept import Fault, KeepingCase, check_keeping_case, keeping_cases
from varlen_graphs.stats import Stats

ROUND = 100
"""Cases tried in a row, between two looks at the clock."""

NAMES = {"torch": torch} | vars(vg.layouts) | vars(vg.outputs) | vars(vg.budgets) | vars(parts) | vars(vg)
NAMES |= {kind.__name__: kind for kind in (Call, Case, Change, Claim, Fault, Flaw, KeepingCase)}
"""What the text of a case is made of."""


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=3, help="when to stop")
    arguments.add_argument("--seed", type=int, help="the seed of the first round; later rounds count on from it")
    arguments.add_argument("--case", help="run this case alone")
    arguments.add_argument(
        "--wrong", choices=["encoders", "state", "declarations"], help="what is wrong, and must not answer"
    )
    arguments.add_argument("--exact", action="store_true", help="graphs of exactly the size of calls")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = {
        None: (check_case, cases),
        "encoders": (check_wrong_case, wrong_cases),
        "state": (check_keeping_case, keeping_cases),
        "declarations": (check_claim, claims),
    }
    check, drawn = (check_exact_case, cases) if options.exact else kinds[options.wrong]
    if options.wrong:
        warnings.simplefilter("ignore")  # each is warned of

    if options.case:
        check(eval(options.case, NAMES), device)
        return print("passed")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    end = time.monotonic() + 60 * options.minutes
    count, latest = Counter(), None

    @hypothesis.settings(
        max_examples=ROUND, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet, print_blob=False,
    )  # fmt: skip
    @hypothesis.given(drawn())
    def one_round(case):
        nonlocal latest
        latest = case
        stats = check(case, device) or Stats()  # none if the declaration was refused
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
