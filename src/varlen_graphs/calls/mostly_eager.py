"""Tell that most of the last calls ran eager, why, and what to do."""

from collections import Counter, deque

from varlen_graphs.calls.lazy_capture import NOT_CAPTURED, Requests
from varlen_graphs.capture.ambient import (
    AUTOCAST_CHANGED,
    DETERMINISM_CHANGED,
    DTYPE_CHANGED,
    TF32_CHANGED,
    TRAINING_CHANGED,
)
from varlen_graphs.capture.mode import HOOKS
from varlen_graphs.declaration.signature import Signature
from varlen_graphs.errors import warn
from varlen_graphs.routing.enabled import (
    CAPTURE_FAILED,
    OVER_LIMIT,
    TOO_LARGE,
    UNSETTLED,
    VERIFICATION_FAILED,
    WRONG_OUTPUT,
)
from varlen_graphs.routing.router import Router
from varlen_graphs.stats import Stats

MOST, OF_LAST = 90, 100
"""Number of eager calls among so many that is told."""

PATIENCE = 1000
"""Number of calls after which somebody should have captured for a lazy encoder."""

AS_MADE = "calls have to run as the encoder was made: make it in the state of the calls, or put the module back"
AS_CAPTURED = "put the setting back, or call encoder.release(), so that the next call captures with it"
REMEDIES = {
    CAPTURE_FAILED: "encoder.report() has the errors; mend them, or free memory, and call encoder.release()",
    UNSETTLED: "encoder.report() says what changes; keep it as it is, and call encoder.release()",
    WRONG_OUTPUT: "encoder.verify([call]) says where it differs, after encoder.release()",
    VERIFICATION_FAILED: "encoder.verify([call]) says where it differs, after encoder.release()",
    OVER_LIMIT: "allow more by memory=, or give the encoder smaller budgets",
    NOT_CAPTURED: "nobody captures what calls request: call encoder.capture_in_background() at the start, or "
    "encoder.capture_pending() between calls",
    HOOKS: "replays run no hooks: remove them, or read hidden states by outputs=",
    TRAINING_CHANGED: "call eval() on the module, or make the encoder in training mode",
    AUTOCAST_CHANGED: AS_MADE,
    DTYPE_CHANGED: AS_CAPTURED,
    DETERMINISM_CHANGED: AS_CAPTURED,
    TF32_CHANGED: AS_CAPTURED,
}
"""Remedies, by the reasons for which nobody wants calls to run eager."""

ONLY_ITSELF = "only the module itself answers such calls: leave out what they ask for, or declare it"


class MostlyEager:
    """Warns once for each reason for which most of the last calls ran eager. Replayed calls cost nothing here.

    Args:
        name: Name of the module.
        stats: Tells how many calls there were.
        router: Knows the budgets, and what calls of a lazy encoder requested.
        signature: Knows which calls the user lets run eager.
    """

    def __init__(self, name: str, stats: Stats, router: Router, signature: Signature) -> None:
        self._name = name
        self._stats = stats
        self._router = router
        self._signature = signature
        self._last: deque[tuple[int, str]] = deque(maxlen=MOST)  # the number of a call, and its reason
        self._told: set[str] = set()

    def note(self, reason: str, only_itself: bool) -> None:
        """Take in that the last call, or some of its items, ran eager, and warn if most of the last calls did.

        Args:
            reason: Why.
            only_itself: True if the call asks for something that only the module itself can answer.
        """
        calls, last = self._stats.calls, self._last
        if (last and last[-1][0] == calls) or not (only_itself or self._is_loss(reason)):
            return
        last.append((calls, reason))
        if len(last) < MOST or calls - last[0][0] >= OF_LAST:
            return
        (common, count), *_ = Counter(text for _, text in last).most_common(1)
        last.clear()  # to look again after as many more
        if common not in self._told and common != self._signature.why_eager():
            self._told.add(common)
            warn(
                f"{MOST} of the last {OF_LAST} calls of {self._name} ran eager, {count} of them for this reason: "
                f"{common}; {self._remedy(common, reason)}. encoder.stats.eager counts all reasons"
            )

    def _is_loss(self, reason: str) -> bool:
        """Return True if calls that run eager for a reason are slower than they could be, and nobody asked for it."""
        if reason == NOT_CAPTURED:
            requests: Requests | None = getattr(self._router, "requests", None)
            return self._stats.calls > PATIENCE and requests is not None and not requests.asked
        return reason == TOO_LARGE or reason in REMEDIES

    def _remedy(self, common: str, reason: str) -> str:
        if common != TOO_LARGE:
            return REMEDIES.get(common, ONLY_ITSELF)
        detail = getattr(reason, "detail", "") if reason == TOO_LARGE else ""
        reach = f"{f'the last has {detail}; ' if detail else ''}{self._router.budgets.describe()}"
        return (
            f"{reach}: give the encoder budgets that hold such calls, or plan them by encoder.record() and vg.traffic"
        )
