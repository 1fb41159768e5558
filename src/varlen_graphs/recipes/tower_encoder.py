"""The parts that encoders of recipes share whose calls are not those of their graphs."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Self

from torch import nn

from varlen_graphs.budgets.budget import Budget
from varlen_graphs.calls.gauges import bytes_of
from varlen_graphs.calls.warmup_file import WarmupSection
from varlen_graphs.capture.outer_compiler import not_compiled
from varlen_graphs.capture.torch_modes import watcher
from varlen_graphs.encoder import GraphedEncoder


class TowerEncoder(GraphedEncoder):
    """Encoder that is called as its tower is, prepares each call for its graphs, or lets the tower itself answer."""

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode the items of one call: see `forward`. Runs hooks on the encoder itself, if there are any."""
        if self._forward_hooks or self._forward_pre_hooks:
            return nn.Module.__call__(self, *args, **kwargs)
        if (by := watcher(args, kwargs)) is not None and not self.executor.forward.is_running:
            return self._itself(by, 1, args, kwargs, only_itself=False)
        return self.forward(*args, **kwargs)

    @property
    def _own_forward(self) -> Callable[..., Any]:
        """The tower itself, called as this encoder is."""
        return self.executor.forward.itself

    def _itself(
        self, reason: str, items: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], only_itself: bool = True
    ) -> Any:
        """Return the output of the tower itself, and count the call."""
        self.executor.begin()
        self.stats.count_call(items)
        self.executor.count_eager(reason, only_itself)
        return self._own_forward(*args, **kwargs)

    def _instead(
        self, other: Mapping[str, Any], items: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """Return the output of another call, and True; of the call as it came, and False, if no graph may answer.

        Hooks, attentions, keys and values show which call the tower answers.
        """
        self.executor.begin()
        bound, mode = self.executor.bind((), dict(other)), self.executor.mode
        reason = bound.eager_reason or mode.eager_reason() or mode.why_no_graphs(bound.rows.device)
        if reason is not None:
            return self._itself(reason, items, args, kwargs), False
        return self.executor.answer(bound, None), True


class SeveralEncoders(TowerEncoder):
    """Encoder that answers some calls by other encoders of the same tower.

    Budgets and statistics are those of this encoder; the others have their own.

    Attributes:
        others: The other encoders, in a tuple, so that they are no submodules.
    """

    others: tuple[GraphedEncoder, ...] = ()

    def release(self) -> None:
        """Free the graphs of all encoders; see `GraphedEncoder.release`."""
        super().release()
        for one in self.others:
            one.release()

    def capture_again(self: Self) -> Self:
        """Capture what is missing for all encoders; see `GraphedEncoder.capture_again`."""
        super().capture_again()
        for one in self.others:
            one.capture_again()
        return self

    def check(self) -> None:
        """Check all encoders; see `GraphedEncoder.check`."""
        super().check()
        for one in self.others:
            one.check()

    def bytes(self) -> int:
        """Return the bytes that all encoders hold, their pool once."""
        return bytes_of(one.executor.store for one in (self, *self.others))

    def capture_pending(self, most: int | None = 1) -> list[Budget]:
        """Capture what calls of any encoder requested; see `GraphedEncoder.capture_pending`."""
        done = super().capture_pending(most)
        for one in self.others:
            if most is None or len(done) < most:
                done += one.capture_pending(None if most is None else most - len(done))
        return done

    def capture_in_background(self) -> "Future[None]":
        """Capture for all encoders, each in a thread of its own; see `GraphedEncoder.capture_in_background`."""
        future = super().capture_in_background()
        others = [one.capture_in_background() for one in self.others]
        future.add_done_callback(lambda ended: ended.cancelled() and [other.cancel() for other in others])
        return future

    def report(self, path: str | os.PathLike[str] | None = None, *, detail: bool = False) -> str:
        """Return the reports of all encoders; a page has that of this one. See `GraphedEncoder.report`."""
        others = (f"some calls are answered by {one.report(detail=detail)}" for one in self.others)
        return "\n\n".join([super().report(path, detail=detail), *others])

    def warmup_sections(self) -> list[WarmupSection]:
        """Return those of all encoders; see `GraphedEncoder.save_warmup`."""
        return super().warmup_sections() + [section for one in self.others for section in one.warmup_sections()]

    def poison(self) -> None:
        """Poison the padding of all encoders; see `GraphedEncoder.poison`."""
        super().poison()
        for one in self.others:
            one.poison()


def options_of_others(encoder: GraphedEncoder, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of other encoders: those of the first, and its pool."""
    own = {name: value for name, value in options.items() if name not in ("forward", "eager_if")}
    return {"pool": encoder.pool} | own
