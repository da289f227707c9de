"""What one worker leases and promises, shared by its step loop and its transfer threads."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvtransfer.core.ledger import LeaseLedger
from kvtransfer.core.promises import Promises


@dataclass(frozen=True, slots=True)
class Ready:
    """How far the source is with a request's pages."""

    num_pages: int  # may be fetched
    is_complete: bool  # leased: there will be no more
    token: int | None = None  # that follows, once complete: the receiver may go on with it


def _nothing() -> None:
    """Until an engine asks to be woken."""


class Leases:
    """``LeaseLedger`` and ``Promises`` with a lock and a clock. Any thread may call it; no call
    waits long.

    ``on_free`` is called, outside the lock, when pages are there to ``take_free``: an idle engine
    sets it to whatever wakes its loop.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_free: Callable[[], None] = _nothing
        self._ledger = LeaseLedger(lease_s)
        self._promises = Promises()
        self._waiting: dict[str, list[tuple[int, Future[Ready | None]]]] = {}
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def lease_s(self) -> float:
        return self._ledger.lease_s

    def grant(
        self, request_id: str, pages: list[int], num_tokens: int, token: int | None = None
    ) -> None:
        with self._lock:
            self._ledger.grant(request_id, pages, num_tokens, self._clock(), token)
            self._promises.revoke(request_id)
        self._tell(request_id)

    def renew(self, request_id: str) -> bool:
        with self._lock:
            return self._ledger.renew(request_id, self._clock())

    def begin_send(self, request_id: str) -> tuple[int, ...] | None:
        with self._lock:
            return self._ledger.begin_send(request_id, self._clock())

    def end_send(self, request_id: str, pages: tuple[int, ...]) -> None:
        with self._lock:
            self._ledger.end_send(request_id, pages, self._clock())
        self.on_free()

    def release(self, request_id: str) -> None:
        with self._lock:
            self._ledger.release(request_id)
        self.on_free()

    def expire(self) -> list[str]:
        with self._lock:
            return self._ledger.expire(self._clock())

    def take_free(self) -> list[int]:
        with self._lock:
            return self._ledger.take_free()

    def held(self) -> dict[str, int]:
        with self._lock:
            return self._ledger.held()

    def promise(self, request_id: str, pages: list[int], num_ready: int) -> None:
        """The request is still being computed: its first pages may be read already."""
        with self._lock:
            self._promises.make(request_id, pages, num_ready)
        self._tell(request_id)

    def revoke(self, request_id: str) -> None:
        """Its pages are about to be used for something else. Idempotent."""
        with self._lock:
            self._promises.revoke(request_id)
        self._tell(request_id)

    def ready(self, request_id: str, num_pages: int) -> "Future[Ready | None]":
        """Done once more than ``num_pages`` may be read, or all; with None when the request is not
        promised or leased any more. Whoever stops waiting cancels it."""
        future: Future[Ready | None] = Future()
        with self._lock:
            self._waiting.setdefault(request_id, []).append((num_pages, future))
        self._tell(request_id)
        return future

    def peek(self, request_id: str, stop: int) -> tuple[int, ...] | None:
        """The first ``stop`` promised pages, not pinned: see ``holds``. Of a promise that has
        become a lease since its reader last asked, those of the lease."""
        with self._lock:
            promised = self._promises.ready(request_id, stop)
            if promised is not None:
                return promised
            leased = self._ledger.pages(request_id, self._clock())
            return None if leased is None else leased[:stop]

    def holds(self, request_id: str, pages: tuple[int, ...]) -> bool:
        """Whether what was read from ``peek``'s pages until now is what was promised."""
        with self._lock:
            return self._promises.holds(request_id, pages) or self._ledger.holds(
                request_id, pages, self._clock()
            )

    def _tell(self, request_id: str) -> None:
        """Answer those that wait for the request's pages. Futures are set outside the lock."""
        with self._lock:
            waiting = self._waiting.pop(request_id, None)
            if waiting is None:
                return
            ready = self._progress(request_id)
            is_over = ready is None or ready.is_complete
            done = [w for w in waiting if is_over or (ready and ready.num_pages > w[0])]
            left = [w for w in waiting if w not in done and not w[1].cancelled()]
            if left:
                self._waiting[request_id] = left
        for _, future in done:
            if future.set_running_or_notify_cancel():
                future.set_result(ready)

    def _progress(self, request_id: str) -> Ready | None:
        num_ready = self._promises.num_ready(request_id)
        if num_ready is not None:
            return Ready(num_ready, False)
        leased = self._ledger.pages(request_id, self._clock())
        if leased is None:
            return None
        return Ready(len(leased), True, self._ledger.token(request_id))
