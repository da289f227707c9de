"""Where a request goes follows from loads and lengths alone, and the reason says so."""

import random

import pytest

from serving.core.admission import admit
from serving.core.inflight import InFlight
from serving.core.router import (
    CROWD_TOKENS,
    HARM,
    MOVE,
    MOVE_TOKENS,
    NoRoute,
    ReplicaView,
    RouteDecision,
    route,
)
from workers.core.output import Load


def view(id: str, capacity: int = 8192, **load: int) -> ReplicaView:
    return ReplicaView(id, id.split("-")[0], capacity, **load)


def go(*replicas: ReplicaView, prompt: int = 100, total: int = 200, **how: object) -> RouteDecision:
    return route(prompt, total, replicas, **how)  # type: ignore[arg-type]


def pair(decision: RouteDecision) -> tuple[str, str]:
    return decision.prefill, decision.decode


def test_a_short_prompt_stays_mixed_and_the_reason_names_the_price() -> None:
    decision = go(view("mixed-0", decode_seqs=3), view("prefill-0"), prompt=12)
    assert (decision.mode, pair(decision)) == ("mixed", ("mixed-0", "mixed-0"))
    assert "12 prompt tokens behind 0 queued, slowing 3 decodes" in decision.reason
    assert "disaggregated over prefill-0 to mixed-0 would cost" in decision.reason


def test_a_long_prompt_keeps_clear_of_running_streams() -> None:
    decision = go(view("mixed-0", decode_seqs=8), view("prefill-0"), prompt=4000, total=4100)
    assert (decision.mode, pair(decision)) == ("disaggregated", ("prefill-0", "mixed-0"))


def test_a_long_prompt_on_an_idle_worker_stays_where_it_is() -> None:
    assert go(view("mixed-0"), view("prefill-0"), prompt=4000, total=4100).mode == "mixed"


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    decision = go(view("mixed-0", queued_tokens=4000), view("prefill-0"), prompt=12)
    assert pair(decision) == ("prefill-0", "mixed-0")


def test_a_full_prefill_queue_sends_work_back_to_mixed() -> None:
    busy = view("prefill-0", queued_tokens=60_000)
    assert go(view("mixed-0", decode_seqs=8), busy, prompt=4000, total=4100).mode == "mixed"


def test_roles_are_preferences() -> None:
    workers = [view("prefill-0"), view("mixed-0", decode_seqs=1), view("decode-0")]
    assert pair(go(*workers, mode="disaggregated")) == ("prefill-0", "decode-0")
    assert pair(go(*workers, mode="mixed")) == ("mixed-0", "mixed-0")
    assert pair(go(view("prefill-0"), view("decode-0"), mode="mixed")) == ("decode-0", "decode-0")
    assert pair(go(view("prefill-0"))) == ("prefill-0", "prefill-0")
    assert pair(go(view("mixed-0"), view("decode-0"), mode="disaggregated")) == (
        "mixed-0",
        "decode-0",
    )


def test_mixed_workers_share_without_moving_pages_unless_asked() -> None:
    workers = [view("mixed-0", decode_seqs=8), view("mixed-1", decode_seqs=7)]
    assert pair(go(*workers, prompt=4000, total=4100)) == ("mixed-1", "mixed-1")
    assert go(*workers, mode="disaggregated").is_split


def test_pinned_workers_are_used_whatever_they_cost() -> None:
    workers = [view("mixed-0", queued_tokens=9999), view("mixed-1"), view("prefill-0")]
    assert pair(go(*workers, pinned=["mixed-0"])) == ("mixed-0", "mixed-0")
    assert pair(go(*workers, pinned=["mixed-1", "mixed-0"])) == ("mixed-1", "mixed-0")
    with pytest.raises(NoRoute, match="no worker 'x' is attached"):
        go(*workers, pinned=["x"])
    with pytest.raises(NoRoute, match="does not fit the pinned workers"):
        go(*workers, pinned=["mixed-0"], mode="disaggregated")


def test_what_cannot_be_served_says_why() -> None:
    with pytest.raises(NoRoute, match="no worker is attached"):
        go()
    with pytest.raises(NoRoute, match="disaggregated needs two workers"):
        go(view("mixed-0"), mode="disaggregated")


def test_each_worker_must_hold_what_it_is_given() -> None:
    """FAULTS 27: the prompt on the prefill worker, the whole answer on the decode worker."""
    small, large = view("decode-0", capacity=1024), view("prefill-0", capacity=4096)
    with pytest.raises(NoRoute, match="1500 tokens may grow to 1600") as raised:
        go(small, large, prompt=1500, total=1600, mode="disaggregated", avoid=())
    assert raised.value.too_long
    assert pair(go(small, large, prompt=1500, total=1600)) == ("prefill-0", "prefill-0")
    assert pair(go(small, large, prompt=900, total=1000, mode="disaggregated")) == (
        "prefill-0",
        "decode-0",
    )


def test_a_worker_that_just_failed_is_the_last_choice() -> None:
    workers = [view("mixed-0"), view("mixed-1", queued_tokens=500)]
    assert pair(go(*workers, avoid=["mixed-0"])) == ("mixed-1", "mixed-1")
    assert pair(go(workers[0], avoid=["mixed-0"])) == ("mixed-0", "mixed-0")


def test_every_candidate_is_kept_cheapest_first() -> None:
    decision = go(view("mixed-0"), view("mixed-1", decode_seqs=2), view("prefill-0"))
    costs = [candidate.cost for candidate in decision.candidates]
    assert costs == sorted(costs)
    assert len(costs) == 4


def test_a_burst_between_two_reports_is_seen() -> None:
    sent, load = InFlight(), Load(step=7)
    sent.add("mixed-0", "a", 100, load, now=0.0)
    sent.add("mixed-0", "b", 50, load, now=0.0)
    assert sent.unreported("mixed-0", load, now=1.0) == [100, 50]
    newer = Load(step=8)
    assert sent.unreported("mixed-0", newer, now=0.01) == [100, 50], "it may have crossed them"
    assert sent.unreported("mixed-0", newer, now=1.0) == []
    sent.remove("mixed-0", "a")
    sent.remove("mixed-0", "a")
    assert sent.unreported("mixed-0", load, now=1.0) == [50]


def test_admission_counts_whichever_is_larger_of_reported_and_sent() -> None:
    idle = [Load(), Load()]
    assert admit(idle, num_unanswered=0, num_new=1, max_queue=2) is None
    assert admit(idle, num_unanswered=3, num_new=1, max_queue=2) is None
    refusal = admit(idle, num_unanswered=4, num_new=1, max_queue=2)
    assert refusal is not None and refusal.retry_after_s == 1.0
    assert admit([Load(waiting_seqs=2)], 0, 1, max_queue=2) is not None
    assert admit([Load(running_seqs=3, decode_seqs=1)], 3, 1, max_queue=2) is None
    assert admit([Load()], 0, 16, max_queue=4) is None, "one call may be larger than the queue"


def test_retry_after_grows_with_the_queue_within_bounds() -> None:
    def after(waiting: int, step_s: float) -> float:
        refusal = admit([Load(waiting_seqs=waiting, step_s=step_s)], 0, 1, max_queue=1)
        assert refusal is not None
        return refusal.retry_after_s

    assert (after(10, 0.01), after(10, 0.5), after(1000, 0.5)) == (1.0, 5.0, 30.0)


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_pair_is_found_without_pricing_every_pair(seed: int) -> None:
    rng = random.Random(seed)
    load = {"queued_tokens": 3000, "decode_seqs": 9, "waiting_seqs": 4}
    replicas = [
        view(f"{rng.choice(('mixed', 'prefill', 'decode'))}-{i}",
             **{key: rng.randrange(high) for key, high in load.items()})
        for i in range(12)
    ] + [view("prefill-x"), view("decode-x")]  # fmt: skip
    prompt = rng.choice((20, 3000))

    def cost(p: ReplicaView, d: ReplicaView) -> float:
        wait = p.queued_tokens + prompt + HARM * p.decode_seqs * prompt
        crowd = CROWD_TOKENS * (d.decode_seqs + d.waiting_seqs) + HARM * d.queued_tokens
        return wait + crowd + MOVE_TOKENS + MOVE * prompt

    ways = [(p, d) for p in replicas for d in replicas if (p.role, d.role) == ("prefill", "decode")]
    decision = go(*replicas, prompt=prompt, total=prompt + 9, mode="disaggregated")
    assert decision.candidates[0].cost == pytest.approx(min(cost(p, d) for p, d in ways))
