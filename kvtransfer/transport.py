"""How a worker brings another worker's pages into its own pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.core.handle import KVHandle


class TransferError(Exception):
    """The pages did not arrive intact. The receiver recomputes what it was promised."""


@dataclass(frozen=True, slots=True)
class Landing:
    """All pages of an early fetch are here."""

    token: int | None  # the next one, which the source sampled last, if it told
    took_s: float  # since the source had said that all is computed


class Transport(Protocol):
    """One per worker process. Any thread may call it; the step loop never does."""

    def fetch(
        self, handle: KVHandle, pages: Sequence[int], timeout_s: float, skip: int = 0
    ) -> None:
        """Fill ``pages`` of this worker's pool with the pages that ``handle`` names, but for the
        first ``skip``, which are here already.

        Blocks until the bytes are in place and checked, then lets the source release its lease.
        Raises TransferError within ``timeout_s`` otherwise; afterwards nothing writes to
        ``pages`` any more, whatever the source still does.
        """
        ...

    def fetch_early(
        self, handle: KVHandle, pages: Sequence[int], timeout_s: float, skip: int = 0
    ) -> Landing:
        """As ``fetch``, of pages that the source is still computing: each is brought when it is
        finished. ``timeout_s`` is for each wait and each transfer."""
        ...

    def renew(self, handle: KVHandle) -> bool:
        """Keep the lease alive while the handle waits for room here. Blocks for a round trip.

        False when the source does not confirm it: gone, restarted, or the lease has ended.
        """
        ...

    def release(self, handle: KVHandle) -> None:
        """Tell the source that nobody will fetch this handle. Idempotent, never raises."""
        ...

    def close(self) -> None:
        """Drop every connection. Pending fetches raise TransferError."""
        ...


def check_room(handle: KVHandle, pages: Sequence[int], skip: int) -> None:
    """TransferError unless the receiver made room for exactly the pages that are to come."""
    if skip + len(pages) != handle.num_pages:
        raise TransferError(
            f"{handle.num_pages} pages on offer, {skip} here already, room made for {len(pages)}"
        )
