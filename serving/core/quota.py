"""How much one key may use: buckets that refill with time. Pure; ``now`` comes in.

A bucket holds one minute's worth. What is known before (a request) is asked for; what is known only
afterwards (tokens) is charged, and a bucket in debt admits nothing until it has refilled.
"""

from dataclasses import dataclass, field

MINUTE_S = 60.0


class Bucket:
    """``per_minute`` at most in any burst, and as a rate after it."""

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        self._level = per_minute
        self._at: float | None = None

    def wait_s(self, amount: float, now: float) -> float:
        """How long until ``amount`` can be had; 0 when it can be now. Takes nothing.

        More than a full bucket is granted to a full bucket, which is in debt afterwards.
        """
        self._refill(now)
        missing = min(amount, self._per_minute) - self._level
        return max(0.0, missing * MINUTE_S / self._per_minute)

    def charge(self, amount: float, now: float) -> None:
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        if self._at is not None:
            gained = max(0.0, now - self._at) * self._per_minute / MINUTE_S
            self._level = min(self._per_minute, self._level + gained)
        self._at = now


@dataclass(frozen=True, slots=True)
class Refused:
    """Which limit is used up, and when to come again."""

    what: str
    retry_after_s: float


@dataclass(slots=True)
class Quota:
    """Of one key. ``None``: no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    _requests: Bucket | None = field(init=False)
    _tokens: Bucket | None = field(init=False)

    def __post_init__(self) -> None:
        self._requests = _bucket(self.requests_per_minute)
        self._tokens = _bucket(self.tokens_per_minute)

    def admit(self, num_tokens: int, now: float) -> Refused | None:
        """Take one request with ``num_tokens`` of prompt, or say what stands against it."""
        wanted = (("requests", self._requests, 1), ("tokens", self._tokens, max(1, num_tokens)))
        waits = [(b.wait_s(n, now), what) for what, b, n in wanted if b is not None]
        longest, what = max(waits, default=(0.0, ""))
        if longest > 0:
            return Refused(f"{what} per minute", longest)
        for _, bucket, amount in wanted:
            if bucket is not None:
                bucket.charge(amount, now)
        return None

    def charge(self, num_tokens: int, now: float) -> None:
        """Tokens that were generated."""
        if self._tokens is not None:
            self._tokens.charge(num_tokens, now)


def _bucket(per_minute: float | None) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute)
