"""Captures in a thread of its own, one budget at a time, while calls go on."""

import atexit
import os
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from varlen_graphs.calls.capture_queue import CaptureQueue
from varlen_graphs.capture.pool import Pool

LOOKS = 0.05
"""Seconds after which a thread that waits for the pool's turn checks that it is still needed."""

LAST = 30.0
"""Seconds that the end of the interpreter waits for a capture in progress."""


class Background(threading.Thread):
    """Captures what is queue until its future is cancelled, a capture fails, or the encoder or interpreter ends.

    Args:
        queue: The graphs to capture; not kept alive while there is nothing to do.
        pool: The pool whose turn a capture takes.

    Attributes:
        future: Pending as long as the thread works. Cancelling it ends the thread; it gets the error that ended it.
    """

    def __init__(self, queue: CaptureQueue, pool: Pool) -> None:
        super().__init__(name="varlen_graphs captures", daemon=True)
        self.future: Future[None] = Future()
        self._queue = weakref.ref(queue, self._wake)
        self._pending = queue.pending
        self._pool = pool
        self.future.add_done_callback(self._wake)

    @classmethod
    def of(cls, queue: CaptureQueue, pool: Pool) -> "Background":
        """Return the thread that captures these graphs; start it if there is none."""
        with _starting:
            alive = (one for one in [*_running] if one._queue() is queue and one.is_alive())
            thread = next((one for one in alive if not one.future.done()), None)
            if thread is None:
                thread = cls(queue, pool)
                thread.start()
                _running.add(thread)
            return thread

    def run(self) -> None:
        """Capture one budget after the other."""
        try:
            while True:
                self._pending.wait()
                if not self._capture_all():
                    break
        except BaseException as error:
            if not self.future.cancelled() and (queue := self._queue()) is not None:
                queue.count_failure(error)  # before whoever waits for the future looks
            self._end(error)
        else:
            self._end()

    def stop(self) -> None:
        """End the thread, and wait for a capture in progress."""
        self.future.cancel()
        self.join(LAST)

    def _capture_all(self) -> bool:
        """Capture all that is queue; return True if there may be more to do."""
        while not self.future.done():
            if not self._pool.lock.acquire(timeout=LOOKS):
                continue
            try:
                queue = self._queue()
                if queue is None:
                    return False
                if not queue.capture(1):
                    return True
                del queue
            finally:
                self._pool.lock.release()
        return False

    def _end(self, error: BaseException | None = None) -> None:
        with suppress(InvalidStateError):  # it was cancelled
            if error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(error)

    def _wake(self, *ended: object) -> None:
        self._pending.set()


_running: "weakref.WeakSet[Background]" = weakref.WeakSet()
_starting = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_starting._at_fork_reinit)  # type: ignore[attr-defined]


@atexit.register
def _stop_all() -> None:
    for thread in [*_running]:
        thread.stop()
