"""The step budget keeps promised gaps and uses what they leave; prompts go in a sensible order."""

import itertools
import math
import random

import pytest

from tests.stepper import Stepper, request
from workers.core.budget import CEILING_S, Due, earliest_first, room_for, shortest_first, urgency
from workers.core.latency import LatencyModel, features
from workers.core.plan import BatchShape
from workers.core.policy import Limits
from workers.core.request import SLO

CPU = (0.013, 2e-4, 3e-7, 6e-4, 1.1e-6, 5e-4)  # a 135M model on two cores
ONLINE = Limits(2048, 64, online=True)
NO_DECODES = BatchShape(0, 0, 0, 0)


class Machine:
    def __init__(self, noise: float = 0.05, slow: float = 1.0) -> None:
        self.rng, self.noise, self.slow = random.Random(1), noise, slow

    def __call__(self, shape: BatchShape) -> float:
        base = sum(c * x for c, x in zip(CPU, features(shape), strict=True))
        return self.slow * base * math.exp(self.rng.gauss(0, self.noise))


def stepper(limits: Limits = ONLINE, machine: Machine | None = None) -> Stepper:
    return Stepper(
        limits,
        4000,
        step_s=machine or Machine(),
        latency=LatencyModel(CPU, 0.05),
        prefix_caching=False,
    )


def run_until(s: Stepper, *names: str) -> None:
    start = s.step
    while not all(name in s.token_times for name in names):
        s.run_step()
        assert s.step - start < 5000, "stuck"


def interference(s: Stepper, itl_s: float, num_prompts: int = 3) -> list[float]:
    """Eight streams and a 4,000-token prompt now and then; the TTFTs of the prompts."""
    for i in range(8):
        s.submit(request(f"stream{i}", 32, 10_000, slo=SLO(2.0, itl_s)))
    run_until(s, *(f"stream{i}" for i in range(8)))
    ttfts = []
    for i in range(num_prompts):
        sent_at = s.now
        s.submit(request(f"long{i}", 4000 + i, 2, arrived_at=sent_at, slo=SLO(2.0, itl_s)))
        run_until(s, f"long{i}")
        ttfts.append(s.token_times[f"long{i}"][0] - sent_at)
    return ttfts


def gaps(s: Stepper) -> list[float]:
    return [
        b - a
        for name, times in s.token_times.items()
        if name.startswith("stream")
        for a, b in itertools.pairwise(times[2:])
    ]


def kept(s: Stepper, itl_s: float) -> float:
    every = gaps(s)
    return sum(gap <= itl_s for gap in every) / len(every)


@pytest.mark.parametrize("itl_s", [0.06, 0.1, 0.2])
def test_gaps_stay_within_the_slo_and_no_fixed_budget_is_faster(itl_s):
    """Within 10 % of the best fixed budget that keeps 99 % of the gaps, too."""
    online = stepper()
    ttfts = interference(online, itl_s)
    assert kept(online, itl_s) >= 0.99
    best = math.inf
    for budget in (24, 32, 48, 64, 96, 128, 160, 192, 256, 320):
        fixed = stepper(Limits(budget, 64))
        times = interference(fixed, itl_s)
        if kept(fixed, itl_s) >= 0.99:
            best = min(best, sum(times))
    assert sum(ttfts) <= 1.1 * best


def test_a_tighter_promise_to_one_stream_is_honoured():
    s = stepper()
    s.submit(request("stream-tight", 32, 300, slo=SLO(2.0, 0.05)))
    s.submit(request("stream-loose", 32, 10_000, slo=SLO(2.0, 0.5)))
    run_until(s, "stream-tight", "stream-loose")
    s.submit(request("long", 4000, 2, arrived_at=s.now))
    run_until(s, "long")
    assert kept(s, 0.05) >= 0.99
    while "stream-tight" not in s.ended:
        s.run_step()
    s.token_times.clear()
    s.submit(request("another", 3000, 2, arrived_at=s.now))
    run_until(s, "another")
    assert max(gaps(s)) > 0.1, "nobody is left who needs short steps"


def test_gaps_stay_within_the_slo_soon_after_the_machine_turns_slower():
    machine = Machine()
    s = stepper(machine=machine)
    interference(s, 0.2, 1)
    machine.slow = 2.0
    s.submit(request("more", 4000, 2, arrived_at=s.now))
    for _ in range(10):
        s.run_step()
    s.token_times.clear()
    run_until(s, "more")
    assert kept(s, 0.2) >= 0.97


def test_prompts_move_when_decodes_alone_break_the_promise():
    s = stepper()
    for i in range(60):
        s.submit(request(f"stream{i}", 50, 10_000, slo=SLO(2.0, 0.03)))
    run_until(s, *(f"stream{i}" for i in range(60)))
    sent_at = s.now
    s.submit(request("late", 400, 2, arrived_at=sent_at))
    run_until(s, "late")
    assert s.now - sent_at < 10
    alone = s.latency.step_s(BatchShape(0, 0, 60, s.scheduler.decode_context))
    assert alone > 0.03 and gaps(s)[-1] < 2 * alone


def test_a_promise_that_is_kept_with_nothing_to_spare_is_not_given_up():
    model, decodes = LatencyModel(CPU, 0.02), BatchShape(0, 0, 8, 8000)
    alone = model.step_s(decodes)
    spare, lost = (room_for(model, decodes, itl_s) for itl_s in (alone + 0.001, alone - 0.001))
    assert spare.longest(0, 500) == spare.floor_tokens
    assert lost.longest(0, 500) > 2 * spare.floor_tokens


def test_a_lone_prompt_has_long_steps_but_not_so_long_that_a_newcomer_waits():
    s = stepper(machine=Machine(noise=0.0))
    s.submit(request("long", 4000, 2))
    durations = []
    while "long" not in s.token_times:
        before = s.now
        s.run_step()
        durations.append(s.now - before)
    assert max(durations) <= 1.1 * CEILING_S
    assert sorted(durations)[len(durations) // 2] > 0.8 * CEILING_S


@pytest.mark.parametrize("itl_s", [0.06, 0.2])
@pytest.mark.parametrize("num_streams", [0, 8])
def test_a_short_prompt_does_not_wait_for_a_long_one(itl_s, num_streams):
    """First token within 0.4 s although 4,000 tokens came first; those lose little by it."""
    undisturbed = stepper()
    disturbed = stepper()
    ttfts = []
    for s in (undisturbed, disturbed):
        for i in range(num_streams):
            s.submit(request(f"stream{i}", 32, 10_000, slo=SLO(2.0, itl_s)))
        run_until(s, *(f"stream{i}" for i in range(num_streams)))
        s.submit(request("long", 4000, 2, arrived_at=s.now))
        sent_at = s.now
        if s is disturbed:
            for i in range(3):
                for _ in range(10):
                    s.run_step()
                s.submit(request(f"short{i}", 60, 4, arrived_at=s.now))
                short_at = s.now
                run_until(s, f"short{i}")
                assert s.token_times[f"short{i}"][0] - short_at <= 0.2
        run_until(s, "long")
        ttfts.append(s.token_times["long"][0] - sent_at)
    assert ttfts[1] <= 1.15 * ttfts[0]


def test_a_long_prompt_gets_through_an_endless_stream_of_short_ones():
    s = stepper()
    s.submit(request("long", 3000, 2))
    due = max(2.0, 4 * s.latency.prompt_s(0, 3000))
    number = 0
    while "long" not in s.token_times:
        assert s.now < 1.5 * due
        while number < s.now * 12:  # more than the machine can serve
            s.submit(request(f"short{number}", 150, 1, arrived_at=s.now))
            number += 1
        s.run_step()


def test_of_two_long_prompts_the_first_is_finished_first():
    s = stepper()
    for name in "ab":
        s.submit(request(name, 3000, 2))
    alone = s.latency.prompt_s(0, 3000)
    run_until(s, "a", "b")
    assert s.token_times["a"][0] < 1.3 * alone < 1.7 * alone < s.token_times["b"][0]


def test_a_tight_ttft_goes_first_when_not_all_dates_can_be_kept():
    s = stepper()
    s.submit(request("relaxed", 900, 2, slo=SLO(10.0, 0.1)))
    s.submit(request("tight", 1000, 2, arrived_at=0.01, slo=SLO(0.9, 0.1)))
    run_until(s, "relaxed", "tight")
    assert s.token_times["tight"][0] < s.token_times["relaxed"][0]


def test_priority_goes_before_urgency():
    s = stepper()
    s.submit(request("short", 100, 2, priority=1))
    s.submit(request("important", 2000, 2, priority=0))
    run_until(s, "short", "important")
    assert s.token_times["important"][0] <= s.token_times["short"][0]


def test_shortest_first_as_long_as_everybody_makes_it():
    short, long = Due(0, 5.0, 0.5), Due(0, 4.0, 3.0)
    assert urgency([short, long], 0.0, 1.0) is shortest_first
    assert urgency([short, long], 1.0, 1.0) is earliest_first
    assert urgency([short, long], 0.0, 0.5) is earliest_first


def test_room_is_the_longest_chunk_that_fits():
    model = LatencyModel(CPU, 0.05)
    decodes = BatchShape(0, 0, 8, 4000)
    room = room_for(model, decodes, 0.1)
    length = room.longest(1000, 4000)

    def upper_s(tokens: int) -> float:
        return model.upper_s(BatchShape(tokens, tokens * (1000 + tokens), 8, 4000))

    assert upper_s(length) <= 0.1 < upper_s(length + 8)
    room.take(1000, length)
    assert room.longest(0, 500) == 0, "no crumbs"
    assert room_for(model, NO_DECODES, math.inf).longest(0, 10) == 10


def test_decodes_that_do_not_ride_do_not_count():
    """FAULTS 35: the sums that the budget looks at survive every way out of the batch."""
    s = stepper()
    for i in range(20):
        s.submit(request(f"r{i}", 30 + i, 5 + i, slo=SLO(2.0, 0.1 if i % 2 else 0.2)))
    for step in range(60):
        s.run_step()
        if step % 7 == 0:
            s.scheduler.abort(f"r{step // 7}")
    s.run()
    assert s.scheduler.decode_context == 0 and s.scheduler.promised_itl_s == 0.0
