"""What this gateway sent to workers that their load reports cannot contain yet.

Without it a burst between two reports would go to one worker.
"""

from dataclasses import dataclass
from math import inf

from workers.core.output import Load

SETTLE_S = 0.05  # a report this soon after a submission may have crossed it on the way


@dataclass(frozen=True, slots=True)
class Sent:
    """One submission, with the load that the worker had reported at that time."""

    tokens: int
    load: Load
    at: float


class InFlight:
    """Submissions by worker and sequence, until a newer report covers them or they are answered."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[str, Sent]] = {}

    def add(self, worker: str, seq: str, tokens: int, load: Load, now: float) -> None:
        self._sent.setdefault(worker, {})[seq] = Sent(tokens, load, now)

    def remove(self, worker: str, seq: str) -> None:
        """Answered, or over. Idempotent."""
        sent = self._sent.get(worker, {})
        sent.pop(seq, None)
        if not sent:
            self._sent.pop(worker, None)

    def unreported(self, worker: str, load: Load, now: float) -> list[int]:
        """Token counts of the submissions that ``load`` does not contain yet."""
        sent = self._sent.get(worker, {}).values()
        return [s.tokens for s in sent if now < s.at + SETTLE_S or s.load == load]

    def holds_until(self, worker: str, now: float) -> float:
        """Until then ``unreported`` stays as it is, if neither load nor submissions change."""
        sent = self._sent.get(worker, {}).values()
        return min((s.at + SETTLE_S for s in sent if s.at + SETTLE_S > now), default=inf)
