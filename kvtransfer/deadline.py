"""The moment by which a transfer has ended, one way or the other."""

import time
from dataclasses import dataclass

from kvtransfer.transport import TransferError


@dataclass(frozen=True, slots=True)
class Deadline:
    """One for the whole transfer: each wait in it gets what the waits before it left over."""

    at: float  # on time.monotonic

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        return cls(time.monotonic() + timeout_s)

    def left_s(self, what: str) -> float:
        """Seconds left for ``what``; TransferError when there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise TransferError(f"timed out before {what}")
        return left

    def at_most(self, timeout_s: float) -> "Deadline":
        """This one, or one in so many seconds if that is earlier."""
        return Deadline(min(self.at, time.monotonic() + timeout_s))

    def later(self, extra_s: float) -> "Deadline":
        return Deadline(self.at + extra_s)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at
