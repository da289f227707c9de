"""Whether to take one more request. Refusing early costs nothing; a full queue costs everybody."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.core.predict import Ask, Demand, Prompt, ReplicaView, prompt_on
from workers.core.budget import PATIENCE

MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
FULL = 0.95  # of the room for prompts is asked for: a queue does not get shorter


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, and when it may work."""

    reason: str
    retry_after_s: float


def admit(
    num_waiting: int,
    num_prefilling: int,
    num_workers: int,
    num_unanswered: int,
    num_new: int,
    max_queue: int,
    step_s: float,
) -> Refusal | None:
    """None: let them in. ``max_queue`` counts waiting sequences per worker.

    Workers report late, so the sequences that this gateway sent and that have no token yet
    (``num_unanswered``, less those being prefilled) count as well: whichever number is larger.
    """
    waiting = max(num_waiting, num_unanswered - num_prefilling)
    limit = max_queue * num_workers
    if waiting + num_new <= limit or (waiting <= 0 and num_new > limit > 0):
        return None
    retry_s = min(max(waiting * step_s, MIN_RETRY_S), MAX_RETRY_S)
    return Refusal(f"{waiting} sequences are waiting and at most {limit} may", retry_s)


def admit_in_time(
    ask: Ask, replicas: Sequence[ReplicaView], now: float, demand: Demand
) -> Refusal | None:
    """None: let it in. Refused is a request whose first token would come too late wherever it went,
    because of the queues alone, while as many prompts come as can be computed. Not one that is too
    long for its promise even by itself: it is given the time that it needs, as workers do. Not on a
    guess: only where workers have measured how fast they are."""
    fit = [r for r in replicas if r.capacity >= ask.tokens]
    if not all(r.pace.is_measured and r.queued_tokens for r in fit):
        return None  # somebody has no queue
    prompts = [prompt_on(ask, r, now, fit[0].pace) for r in fit]
    room = sum(p.share for p in prompts) * demand.num_workers / max(1, len(replicas))
    if not prompts or demand.work < FULL * room:
        return None
    best = min(prompts, key=_lateness(ask))
    late_s = _lateness(ask)(best)
    if late_s <= 0.0 or best.queue_s <= 0.0:
        return None
    promise = max(ask.slo.ttft_s, PATIENCE * best.prefill_s)
    return Refusal(
        f"the first token would come {best.queue_s + best.prefill_s:.1f} s from now, and "
        f"{promise:.1f} s are promised",
        min(max(late_s, MIN_RETRY_S), MAX_RETRY_S),
    )


def _lateness(ask: Ask) -> Callable[[Prompt], float]:
    """How much later than promised a first token comes."""
    return lambda p: (
        ask.waited_s + p.queue_s + p.prefill_s - max(ask.slo.ttft_s, PATIENCE * p.prefill_s)
    )
