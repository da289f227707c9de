"""The lease ledger of one worker, shared by its step loop and its transfer threads."""

import threading
import time
from collections.abc import Callable

from kvtransfer.core.ledger import LeaseLedger


def _nothing() -> None:
    """Until an engine asks to be woken."""


class Leases:
    """``LeaseLedger`` with a lock and a clock. Any thread may call it; no call waits long.

    ``on_free`` is called, outside the lock, when pages are there to ``take_free``: an idle engine
    sets it to whatever wakes its loop.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_free: Callable[[], None] = _nothing
        self._ledger = LeaseLedger(lease_s)
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def lease_s(self) -> float:
        return self._ledger.lease_s

    def grant(self, request_id: str, pages: list[int], num_tokens: int) -> None:
        with self._lock:
            self._ledger.grant(request_id, pages, num_tokens, self._clock())

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
