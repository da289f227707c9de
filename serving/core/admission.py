"""Whether to take one more request. Refusing early costs nothing; a full queue costs everybody."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.core.output import Load

MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, and when it may work."""

    reason: str
    retry_after_s: float


def admit(
    loads: Sequence[Load], num_unanswered: int, num_new: int, max_queue: int
) -> Refusal | None:
    """None: let them in. ``max_queue`` counts waiting sequences per worker.

    Workers report late, so the sequences that this gateway sent and that have no token yet
    (``num_unanswered``, less those being prefilled) count as well: whichever number is larger.
    """
    prefilling = sum(load.running_seqs - load.decode_seqs for load in loads)
    reported = sum(load.waiting_seqs for load in loads)
    waiting = max(reported, num_unanswered - prefilling)
    limit = max_queue * len(loads)
    if waiting + num_new <= limit or (waiting <= 0 and num_new > limit > 0):
        return None
    step_s = max((load.step_s for load in loads), default=0.0)
    retry_s = min(max(waiting * step_s, MIN_RETRY_S), MAX_RETRY_S)
    return Refusal(f"{waiting} sequences are waiting and at most {limit} may", retry_s)
