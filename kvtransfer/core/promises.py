"""Pages that are still being computed, and that their receiver may fetch as they are finished.

A promise pins nothing: the scheduler may take the pages back at any time and then revokes it. So a
reader copies first and asks afterwards whether the promise still stands (``holds``); what it copied
while the promise was revoked is thrown away. In the end the promise becomes a lease, or is revoked.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Promise:
    pages: tuple[int, ...]
    num_ready: int


class Promises:
    """By request id. Knows no threads: see ``kvtransfer/leases.py``."""

    def __init__(self) -> None:
        self._promises: dict[str, _Promise] = {}

    def make(self, request_id: str, pages: list[int], num_ready: int) -> None:
        """The first ``num_ready`` of ``pages`` may be read; with time there will be more."""
        assert num_ready <= len(pages), f"{request_id}: {num_ready} of {len(pages)} pages"
        promise = self._promises.get(request_id)
        if promise is None:
            self._promises[request_id] = _Promise(tuple(pages), num_ready)
        else:
            assert promise.pages == tuple(pages), f"{request_id}: promised other pages"
            promise.num_ready = max(promise.num_ready, num_ready)

    def revoke(self, request_id: str) -> None:
        """Idempotent."""
        self._promises.pop(request_id, None)

    def num_ready(self, request_id: str) -> int | None:
        """None: there is no such promise."""
        promise = self._promises.get(request_id)
        return None if promise is None else promise.num_ready

    def ready(self, request_id: str, stop: int) -> tuple[int, ...] | None:
        """The first ``stop`` pages; None when they are not all readable."""
        promise = self._promises.get(request_id)
        if promise is None or promise.num_ready < stop:
            return None
        return promise.pages[:stop]

    def holds(self, request_id: str, pages: tuple[int, ...]) -> bool:
        """Whether these, the first pages, have been readable ever since ``ready`` said so."""
        promise = self._promises.get(request_id)
        return promise is not None and promise.pages[: len(pages)] == pages
