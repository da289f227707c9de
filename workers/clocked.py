"""When a sequence passed its milestones on one worker, and what is told of that."""

from dataclasses import dataclass

from workers.core.output import Timing
from workers.core.request import Sequence


@dataclass(slots=True)
class Clocked:
    """When one sequence passed each milestone here; 0.0 is not yet."""

    submitted: float
    planned: float = 0.0
    fetched: float = 0.0
    first_token: float = 0.0
    fallback: str | None = None

    def timing(self, seq: Sequence, now: float) -> Timing:
        started = self.planned or now
        computing = max(started, self.fetched)
        return Timing(
            queue_s=started - self.submitted,
            prefill_s=0.0 if self.fetched else (self.first_token or now) - computing,
            transfer_s=self.fetched - started if self.fetched else 0.0,
            num_preemptions=seq.num_preemptions,
            cached_tokens=min(seq.num_cached, len(seq.request.prompt)),
        )
