"""Where a request goes follows from loads, paces and promises, and the reason says so."""

import random
from dataclasses import replace

import pytest

from serving.core.admission import admit, admit_in_time
from serving.core.fleet import Fleet
from serving.core.predict import Ask, Demand, ReplicaView, prompt_on, share_of, stream_on
from serving.core.prefixes import BLOCK, Prefixes, names_of
from serving.core.router import MARGIN, NoRoute, RouteDecision, rehome, route
from workers.core.budget import room_for
from workers.core.latency import LatencyModel
from workers.core.output import Load
from workers.core.pace import Pace, pace_of
from workers.core.plan import BatchShape
from workers.core.policy import Limits
from workers.core.request import SLO

# An 8B model on one A100: 9 ms a step, 50 us a prompt token, 20 us a decode.
A100 = Pace(
    (9e-3, 5e-5, 1.5e-9, 2e-5, 5e-8, 0.0),
    spread=0.02,
    prompt_margin=1.05,
    decode_margin=1.05,
    token_bytes=131072,
    link_byte_s=4e-11,
    is_measured=True,
)
USUAL, TIGHT_ITL = SLO(2.0, 0.1), SLO(2.0, 0.015)


def view(id: str, capacity: int = 8192, pace: Pace = A100, **load: int) -> ReplicaView:
    streams = load.get("decode_seqs", 0)
    load.setdefault("context_tokens", 1000 * streams)
    promised = 0.1 if streams else 0.0
    return ReplicaView(id, id.split("-")[0], capacity, pace=pace, promised_itl_s=promised, **load)


def go(
    *replicas: ReplicaView, prompt: int = 100, total: int = 200, slo: SLO = USUAL, **how: object
) -> RouteDecision:
    ask = Ask(prompt, total, output_tokens=100.0, slo=slo, brief=0.5)
    return route(ask, replicas, 0.0, **how)  # type: ignore[arg-type]


def pair(decision: RouteDecision) -> tuple[str, str]:
    return decision.prefill, decision.decode


def promised(view: ReplicaView, itl_s: float) -> ReplicaView:
    return replace(view, promised_itl_s=itl_s)


def test_a_short_prompt_stays_mixed_and_the_reason_says_what_to_expect() -> None:
    decision = go(view("mixed-0", decode_seqs=3), view("prefill-0"), prompt=12)
    assert (decision.mode, pair(decision)) == ("mixed", ("mixed-0", "mixed-0"))
    assert "12 prompt tokens, first token expected in" in decision.reason
    assert (
        "disaggregated over prefill-0 to mixed-0 would have its first token in" in decision.reason
    )


def test_a_long_prompt_keeps_clear_of_tight_streams() -> None:
    """Beside twenty streams that were promised 15 ms there is room for a few tokens a step."""
    streams = promised(view("mixed-0", decode_seqs=20), 0.015)
    decision = go(streams, view("prefill-0"), prompt=4000, total=4100, slo=SLO(1.0, 0.1))
    assert (decision.mode, pair(decision)) == ("disaggregated", ("prefill-0", "mixed-0"))
    beside = next(c for c in decision.candidates if c.prefill == "mixed-0")
    assert beside.late_ttft > 0.8


def test_a_long_prompt_on_an_idle_worker_stays_where_it_is() -> None:
    assert go(view("mixed-0"), view("prefill-0"), prompt=4000, total=4100).mode == "mixed"


def test_a_prompt_that_would_come_too_late_behind_a_queue_goes_elsewhere() -> None:
    busy = view("mixed-0", queued_tokens=40_000)
    assert go(busy, view("prefill-0"), prompt=12).prefill == "prefill-0"


def test_a_full_prefill_queue_sends_work_back_to_mixed() -> None:
    busy = view("prefill-0", queued_tokens=60_000)
    assert go(view("mixed-0", decode_seqs=8), busy, prompt=4000, total=4100).mode == "mixed"


def test_roles_are_preferences() -> None:
    workers = [view("prefill-0"), view("mixed-0", decode_seqs=1), view("decode-0")]
    assert pair(go(*workers, mode="disaggregated")) == ("prefill-0", "decode-0")
    assert pair(go(*workers, mode="mixed")) == ("mixed-0", "mixed-0")
    assert pair(go(view("prefill-0"), view("decode-0"), mode="mixed")) == ("decode-0", "decode-0")
    assert pair(go(view("prefill-0"))) == ("prefill-0", "prefill-0")
    assert pair(go(view("prefill-0"), view("decode-0"))) == ("prefill-0", "decode-0")
    assert pair(go(view("mixed-0"), view("decode-0"), mode="disaggregated")) == (
        "mixed-0",
        "decode-0",
    )


def test_another_role_costs_what_it_takes_from_the_role() -> None:
    """A queue of prompts spills over to decode workers whose streams have room, no others."""
    busy = view("prefill-0", queued_tokens=20_000)
    loose, tight = promised(view("decode-0", decode_seqs=5), 0.1), view("decode-0", decode_seqs=60)
    assert go(busy, loose, prompt=900, total=1000).prefill == "decode-0"
    crowded = promised(tight, 0.015)
    ask = SLO(2.0, 0.015)
    assert go(busy, crowded, prompt=900, total=1000, slo=ask).prefill == "prefill-0"


def test_prompts_keep_clear_of_streams_under_a_fixed_budget_that_breaks_promises() -> None:
    """Two short prompts in one step are as bad as a long one, and more of them will come."""
    fixed = replace(A100, is_online=False, max_tokens=4096)
    streams = replace(promised(view("decode-0", decode_seqs=9), 0.1), pace=fixed)
    decision = go(view("prefill-0", queued_tokens=20_000), streams, prompt=900, total=1000)
    assert decision.prefill == "prefill-0"
    ask = Ask(1500, 1600, slo=SLO(2.0, 0.1))
    alone, beside = (
        prompt_on(ask, replace(streams, queued_tokens=n, waiting_seqs=n // 1500), 0.0, A100).harm
        for n in (0, 1500)
    )
    assert alone < 1 < beside


def test_mixed_workers_share_without_moving_pages_unless_asked() -> None:
    workers = [view("mixed-0", decode_seqs=30), view("mixed-1", decode_seqs=7)]
    assert pair(go(*workers, prompt=4000, total=4100)) == ("mixed-1", "mixed-1")
    assert go(*workers, mode="disaggregated").is_split


def test_a_decode_worker_at_its_limit_gets_no_more_streams() -> None:
    """The next stream would break the promise to all of them."""
    full = promised(view("decode-0", decode_seqs=36), 0.0117)
    free = promised(view("decode-1", decode_seqs=34, context_tokens=1000), 0.0117)
    decision = go(view("prefill-0"), full, free, slo=SLO(2.0, 0.1), mode="disaggregated")
    assert decision.decode == "decode-1"
    assert stream_on(Ask(100, 200, slo=SLO(2.0, 0.1)), full, 0.0, A100).harm > 1


def test_a_prompt_keeps_clear_of_streams_whose_steps_have_nothing_to_spare() -> None:
    """Even the few tokens that every prompt is given in a step would break all their promises."""
    ask = Ask(900, 950, output_tokens=50.0, brief=1.0, slo=TIGHT_ITL)
    tight, free = (promised(view("decode-0", decode_seqs=n), 0.015) for n in (80, 20))
    assert prompt_on(ask, tight, 0.0, A100).harm > 5
    assert prompt_on(ask, free, 0.0, A100).harm < 0.1


def test_who_arrives_late_anyway_is_not_harmed() -> None:
    ask = Ask(900, 950, slo=TIGHT_ITL, others_brief=1.0)
    late, early = (
        replace(view("decode-0", decode_seqs=n), arriving_at=(0.01,) * 4, promised_itl_s=0.0)
        for n in (80, 1)
    )
    harms = [prompt_on(ask, w, 0.0, A100).harm for w in (late, early)]
    assert harms[0] < 0.2 < harms[1]


def test_who_arrives_long_afterwards_does_not_meet_the_prompt() -> None:
    ask = Ask(900, 950, slo=TIGHT_ITL, others_brief=1.0)
    soon, later = (
        replace(view("decode-0", decode_seqs=1), arriving_at=(at,) * 4, promised_itl_s=0.0)
        for at in (0.01, 5.0)
    )
    assert prompt_on(ask, soon, 0.0, A100).harm > 0.2
    assert prompt_on(ask, later, 0.0, A100).harm == 0.0


def test_streams_that_come_later_replace_those_that_end_until_then() -> None:
    ask, crowd = (
        Ask(900, 1100, output_tokens=200.0, slo=TIGHT_ITL),
        view("decode-0", decode_seqs=50),
    )
    soon, later = (
        replace(crowd, coming_seqs=30, coming_tokens=30_000, arriving_at=(at,) * 30)
        for at in (0.1, 3.0)
    )
    assert stream_on(ask, later, 0.0, A100).itl_s < stream_on(ask, soon, 0.0, A100).itl_s - 0.001


def test_what_is_cached_is_no_work() -> None:
    workers = [view("mixed-0"), view("mixed-1", decode_seqs=4)]
    ask = Ask(4000, 4100, cached={"mixed-1": 3840})
    decision = route(ask, workers, 0.0)
    assert decision.prefill == "mixed-1" and decision.chosen.prefill_s < 0.05


def test_pages_that_move_while_the_prompt_is_computed_cost_no_gap() -> None:
    workers = [view("prefill-0"), view("decode-0")]
    late = route(Ask(8000, 8100), workers, 0.0, mode="disaggregated").chosen
    early = route(Ask(8000, 8100, is_early=True), workers, 0.0, mode="disaggregated").chosen
    assert early.transfer_s < 0.6 * late.transfer_s


def test_a_stream_on_a_prefill_worker_costs_the_prompts_to_come() -> None:
    """Only when there are many: idle capacity is free."""
    workers = [view("prefill-0"), promised(view("decode-0", decode_seqs=34), 0.015)]
    idle, busy = Demand(2, 0.1, 0.05), Demand(2, 1.5, 0.05)

    def harm(demand: Demand) -> float:
        ways = go(*workers, slo=TIGHT_ITL, demand=demand).candidates
        return next(c.harm for c in ways if (c.prefill, c.decode) == ("prefill-0", "prefill-0"))

    assert harm(idle) == 0.0 and harm(busy) > 1.0


def test_disaggregated_has_to_be_clearly_better() -> None:
    decision = go(view("mixed-0"), view("prefill-0"), view("decode-0"))
    split = [c for c in decision.candidates if c.is_split]
    assert (
        decision.mode == "mixed"
        or decision.chosen.price
        <= min(c.price for c in decision.candidates if not c.is_split) - MARGIN
    )
    assert split


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
    prices = [candidate.price for candidate in decision.candidates]
    assert prices == sorted(prices) and len(prices) > 3


def test_a_stream_that_leaves_its_worker_goes_where_steps_are_shortest() -> None:
    crowded, empty = view("decode-0", decode_seqs=30), view("decode-1")
    assert rehome(200, [crowded, empty, view("mixed-0")]) == "decode-1"
    assert rehome(200, [crowded], avoid=["decode-0"]) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_share_of_prompts_is_what_the_step_budget_gives_them(seed: int) -> None:
    rng = random.Random(seed)
    decodes, itl_s = rng.randint(1, 60), rng.choice((0.012, 0.02, 0.05, 0.1))
    context = 500 * decodes
    model = LatencyModel((9e-3, 5e-5, 1.5e-9, 2e-5, 5e-8, 0.0), 0.05)
    pace = pace_of(model, Limits(max_tokens=1 << 20, online=True), 1)
    room = room_for(model, BatchShape(0, 0, decodes, context), itl_s)
    share = share_of(pace, decodes, context, itl_s)
    assert share.decode_s == pytest.approx(
        model.step_s(BatchShape(0, 0, decodes, context)), rel=0.01
    )
    if share.of_prompts > 0.1:
        assert share.of_prompts == pytest.approx(room.prompt_rate, rel=0.1)


def test_the_first_token_is_expected_when_the_queue_and_the_prompt_are_computed() -> None:
    idle, busy = view("mixed-0"), view("mixed-0", queued_tokens=20_000)
    ask = Ask(1000, 1100)
    alone, behind = prompt_on(ask, idle, 0.0, A100), prompt_on(ask, busy, 0.0, A100)
    assert alone.queue_s == 0 and alone.prefill_s == pytest.approx(0.06, rel=0.05)
    assert behind.queue_s == pytest.approx(1.3 * 20_000 * 5e-5, rel=0.3)


def fleet(*names: str) -> Fleet:
    fleet, load = Fleet(random.Random(0)), Load(free_pages=512, num_pages=512)
    for name in names:
        fleet.attach(name, name.split("-")[0], 8192, 16, load, A100)
    return fleet


def test_a_burst_between_two_reports_is_seen() -> None:
    workers, ask = fleet("mixed-0"), Ask(100, 200)
    workers.sent("mixed-0", "a", ask, 0.0, decodes_at="mixed-0")
    workers.sent("mixed-0", "b", replace(ask, tokens=50), 0.0, decodes_at="mixed-0")
    seen = workers.look("mixed-0", 1.0)
    assert (seen.queued_tokens, seen.waiting_seqs, seen.coming_seqs) == (150, 2, 2)
    newer = Load(step=8, queued_tokens=120)
    workers.heard("mixed-0", newer)
    assert workers.look("mixed-0", 0.01).queued_tokens == 270, "it may have crossed them"
    assert workers.look("mixed-0", 1.0).queued_tokens == 120
    workers.answered("mixed-0", "a")
    workers.answered("mixed-0", "a")
    assert [entry.key for entry in workers.look("mixed-0", 1.0).queue] == ["b"]
    workers.forget("b")
    workers.forget("b")
    assert workers.look("mixed-0", 1.0).coming_seqs == 0


def test_streams_on_their_way_count_where_they_will_decode() -> None:
    workers = fleet("prefill-0", "decode-0")
    workers.sent("prefill-0", "a", Ask(100, 200), 0.0, decodes_at="decode-0")
    assert len(workers.look("decode-0", 0.0).arriving_at) == 1
    workers.answered("prefill-0", "a")
    assert not workers.look("prefill-0", 0.0).queue
    assert workers.look("decode-0", 0.0).coming_seqs == 1
    workers.answered("decode-0", "a")
    assert workers.look("decode-0", 0.0).coming_seqs == 0


def test_of_many_workers_a_request_sees_some_and_the_holders_of_its_prefix() -> None:
    names = [f"{role}-{i}" for role in ("prefill", "decode") for i in range(100)]
    workers = fleet(*names)
    seen = [view.id for view in workers.some(Ask(600, 700, cached={"prefill-77": 512}), 0.0)]
    assert len(seen) < 20 and "prefill-77" in seen
    assert {name.split("-")[0] for name in seen} == {"prefill", "decode"}
    assert len(workers.everybody(0.0)) == 200


def test_of_those_at_a_glance_the_idle_ones_are_seen() -> None:
    workers = fleet(*(f"mixed-{i}" for i in range(10)))
    for i in range(10):
        load = Load(free_pages=512, num_pages=512, queued_tokens=0 if i in (2, 7) else 9000)
        workers.heard(f"mixed-{i}", load)
    seen = [view.id for view in workers.some(Ask(600, 700), 0.0, avoid=["mixed-3"])]
    assert len(seen) == 4 and {"mixed-2", "mixed-7"} < set(seen) and "mixed-3" not in seen


def test_a_request_that_few_can_hold_finds_them() -> None:
    workers = fleet(*(f"mixed-{i}" for i in range(60)))
    workers.attach("mixed-big", "mixed", 100_000, 16, Load(free_pages=8000, num_pages=8000), A100)
    assert [view.id for view in workers.some(Ask(50_000, 60_000), 0.0)] == ["mixed-big"]


def test_who_is_leaving_is_not_chosen_while_others_stay() -> None:
    workers = fleet("mixed-0", "mixed-1")
    workers.stand("mixed-0", "mixed", is_leaving=True)
    assert [view.id for view in workers.everybody(0.0)] == ["mixed-1"]
    workers.detach("mixed-1")
    assert [view.id for view in workers.everybody(0.0)] == ["mixed-0"]


def test_prefixes_are_found_where_they_were_sent_and_under_the_same_salt_only() -> None:
    """FAULTS 47: another salt's prompts leave no trace."""
    prefixes, prompt = Prefixes(), list(range(3 * BLOCK))
    prefixes.add(names_of(prompt, "a"), "mixed-0", 64 * BLOCK)
    longer = prompt[: 2 * BLOCK] + [7] * BLOCK
    assert prefixes.found(names_of(longer, "a")) == {"mixed-0": 2 * BLOCK}
    assert prefixes.found(names_of(longer, "b")) == {}
    prefixes.add(names_of([9] * BLOCK, "a"), "mixed-0", BLOCK)  # a pool of one block
    assert prefixes.found(names_of(longer, "a")) == {}
    prefixes.drop("mixed-0")
    assert prefixes.found(names_of([9] * BLOCK, "a")) == {}


def test_admission_counts_whichever_is_larger_of_reported_and_sent() -> None:
    def refused(waiting: int, prefilling: int, workers: int, unanswered: int, new: int) -> bool:
        limit = 4 if new > 1 else 2
        return admit(waiting, prefilling, workers, unanswered, new, limit, 0.01) is not None

    assert not refused(0, 0, 2, 0, 1)
    assert not refused(0, 0, 2, 3, 1)
    assert refused(0, 0, 2, 4, 1)
    assert refused(2, 0, 1, 0, 1)
    assert not refused(0, 2, 1, 3, 1)
    assert not refused(0, 0, 1, 0, 16), "one call may be larger than the queue"


def test_retry_after_grows_with_the_queue_within_bounds() -> None:
    def after(waiting: int, step_s: float) -> float:
        refusal = admit(waiting, 0, 1, 0, 1, 1, step_s)
        assert refusal is not None
        return refusal.retry_after_s

    assert (after(10, 0.01), after(10, 0.5), after(1000, 0.5)) == (1.0, 5.0, 30.0)


def test_a_request_is_refused_early_only_when_queues_alone_make_it_late() -> None:
    full = [
        view(f"mixed-{i}", queued_tokens=tokens, waiting_seqs=99)
        for i, tokens in enumerate((200_000, 150_000))
    ]
    flood, trickle = Demand(2, 5.0, 0.05), Demand(2, 0.1, 0.05)
    refusal = admit_in_time(Ask(500, 600), full, 0.0, flood)
    assert refusal is not None and 3 < refusal.retry_after_s < 12
    assert "2.0 s are promised" in refusal.reason
    assert admit_in_time(Ask(500, 600), full, 0.0, trickle) is None, "the queue gets shorter"
    idle = [view("mixed-0"), view("mixed-1")]
    assert admit_in_time(Ask(500, 600), idle, 0.0, flood) is None, "nobody waits"
    hopeless = Ask(8000, 8100, slo=SLO(0.1, 0.1))
    assert admit_in_time(hopeless, idle, 0.0, flood) is None, "too long by itself is no reason"
    guessed = [replace(w, pace=Pace()) for w in full]
    assert admit_in_time(Ask(500, 600), guessed, 0.0, flood) is None, "nothing was measured"


@pytest.mark.parametrize("seed", range(20))
def test_the_best_pair_is_found_without_pricing_every_pair(seed: int) -> None:
    rng = random.Random(seed)
    replicas = [
        view(f"{role}-{i}", queued_tokens=rng.randrange(3000), decode_seqs=rng.randrange(9))
        for role in ("prefill", "decode")
        for i in range(8)
    ]
    prompt = rng.choice((20, 3000))
    few = go(*replicas, prompt=prompt, total=3100, mode="disaggregated")
    every = [
        go(p, d, prompt=prompt, total=3100, mode="disaggregated").chosen
        for p in replicas
        for d in replicas
        if (p.role, d.role) == ("prefill", "decode")
    ]
    found = min(c.loss for c in few.candidates)
    assert found <= min(c.loss for c in every) + 0.01
