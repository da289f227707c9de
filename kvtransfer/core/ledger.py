"""Who holds the pages that left the scheduler: a lease, running sends, or nobody any more.

Knows no threads and no clock: see ``kvtransfer/leases.py`` for both.

    scheduler --grant--> leased --release, expire--> free --take_free--> the engine's page pool
                            |                          ^
                       begin_send                      |
                            v                          |
                     leased + sending --release--> sending only --last end_send
"""

from dataclasses import dataclass

MAX_LIVES = 4  # times ``lease_s`` that renewals can keep a lease. Without an end, two workers that
# wait for room while each leases pages to the other would wait for ever.


@dataclass(slots=True)
class _Lease:
    pages: tuple[int, ...]
    expires_at: float
    ends_at: float  # renewals do not reach beyond
    token: int | None = None  # the one that follows those whose KV the pages hold
    num_sends: int = 0


class LeaseLedger:
    """Leases by request id. A page of a shared prefix may be in several; each lease holds it once,
    and gives it back exactly once."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self._closing: list[tuple[str, _Lease]] = []  # released while a send was reading them
        self._free: list[int] = []

    def grant(
        self,
        request_id: str,
        pages: list[int],
        num_tokens: int,
        now: float,
        token: int | None = None,
    ) -> None:
        """Take over ``pages``. An older lease under the same id is released: nobody asks for it."""
        self.release(request_id)
        assert num_tokens > 0, f"{request_id}: nothing computed"
        assert pages and len(set(pages)) == len(pages), f"{request_id}: pages {pages}"
        self._leases[request_id] = _Lease(
            tuple(pages), now + self.lease_s, now + MAX_LIVES * self.lease_s, token
        )

    def renew(self, request_id: str, now: float) -> bool:
        """Start the lease's time again, as long as it may last. False when there is no such lease
        any more."""
        lease = self._live(request_id, now)
        if lease is None:
            return False
        lease.expires_at = min(now + self.lease_s, lease.ends_at)
        return True

    def begin_send(self, request_id: str, now: float) -> tuple[int, ...] | None:
        """Pin the pages for one send; None when the lease is expired, released or unknown."""
        lease = self._live(request_id, now)
        if lease is None:
            return None
        lease.num_sends += 1
        return lease.pages

    def holds(self, request_id: str, pages: tuple[int, ...], now: float) -> bool:
        """Whether a live lease begins with these pages."""
        lease = self._live(request_id, now)
        return lease is not None and lease.pages[: len(pages)] == pages

    def pages(self, request_id: str, now: float) -> tuple[int, ...] | None:
        """Of a live lease, not pinned; None when there is none."""
        lease = self._live(request_id, now)
        return None if lease is None else lease.pages

    def token(self, request_id: str) -> int | None:
        """The one that its holder sampled last, if it told."""
        lease = self._leases.get(request_id)
        return None if lease is None else lease.token

    def end_send(self, request_id: str, pages: tuple[int, ...], now: float) -> None:
        """Unpin what ``begin_send`` returned. The receiver of a failed send may try once more."""
        lease = self._leases.get(request_id)
        if lease is not None and lease.pages == pages:
            assert lease.num_sends > 0, f"{request_id}: end_send without begin_send"
            lease.num_sends -= 1
            lease.expires_at = now + self.lease_s
            return
        closing = [e for e in self._closing if e[0] == request_id and e[1].pages == pages]
        assert closing, f"{request_id}: end_send without begin_send"
        entry = closing[0]
        entry[1].num_sends -= 1
        if entry[1].num_sends == 0:
            self._closing.remove(entry)
            self._free.extend(pages)

    def release(self, request_id: str) -> None:
        """End the lease. Idempotent; the pages come free once no send is reading them."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return
        if lease.num_sends:
            self._closing.append((request_id, lease))
        else:
            self._free.extend(lease.pages)

    def expire(self, now: float) -> list[str]:
        """Release what nobody renewed in time; returns the ids. A running send keeps its lease."""
        gone = [name for name in self._leases if self._live(name, now) is None]
        for request_id in gone:
            self.release(request_id)
        return gone

    def take_free(self) -> list[int]:
        """Pages that nobody holds any more. They are the caller's from here on."""
        free, self._free = self._free, []
        return free

    def held(self) -> dict[str, int]:
        """Request id -> pages still held by its lease or by a send."""
        held: dict[str, int] = {}
        for request_id, lease in [*self._leases.items(), *self._closing]:
            held[request_id] = held.get(request_id, 0) + len(lease.pages)
        return held

    def _live(self, request_id: str, now: float) -> _Lease | None:
        lease = self._leases.get(request_id)
        if lease is None or (lease.num_sends == 0 and lease.expires_at <= now):
            return None
        return lease
