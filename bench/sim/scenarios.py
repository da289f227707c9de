"""Twelve loads that autoscalers get wrong, and what has to hold in each of them.

A worker computes about 2 requests of the usual mix a second. Each scenario is a few minutes of
virtual time; ``judge`` says which promises a run broke, in words.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bench.sim.latency import Coefficients
from bench.sim.outcome import FINISHED
from bench.sim.scaling import ElasticCluster, ElasticPool, Falsify, Scaled, Shown, StartTime
from bench.sim.worker import WorkerSpec
from bench.sim.workload import Arrival, Workload
from serving.core.autoscaler import Autoscaler
from serving.core.demand import DemandStats, Window
from serving.core.scaling import ABSORB, ADD, FLIP, REMOVE, ScaleRules
from workers.core.policy import Limits
from workers.core.request import SLO

SPEC = WorkerSpec(
    Coefficients(2e-2, 4e-4, 8e-9, 2e-4, 4e-7),
    Limits(2048, 128, online=True),
    num_pages=6000,
)
PROMISE = SLO(3.0, 0.15)
RULES = ScaleRules(stable_s=180.0)
SETTLE_S = 300.0  # after the load changed
MAX_SETTLED_EVENTS = 2
REACTION_PERIODS = 2

Rate = Callable[[float], float]  # requests a second, by time
Lengths = Callable[[random.Random, float], tuple[int, int]]


def chats(rng: random.Random, _: float) -> tuple[int, int]:
    """Mean 900 in, 45 out."""
    return 30 + int(rng.expovariate(1 / 870)), 1 + int(rng.expovariate(1 / 45))


def arrivals(rate: Rate, lengths: Lengths, until_s: float, rng: random.Random) -> Workload:
    """A Poisson process whose rate changes, by thinning."""
    most = max(rate(float(t)) for t in range(int(until_s)))
    return Workload("scenario", tuple(_thinned(rate, lengths, most, until_s, rng)))


def _thinned(
    rate: Rate, lengths: Lengths, most: float, until_s: float, rng: random.Random
) -> Iterator[Arrival]:
    now = rng.expovariate(most)
    while now < until_s:
        if rng.random() * most < rate(now):
            yield Arrival(now, *lengths(rng, now))
        now += rng.expovariate(most)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, what is there at first, what goes wrong, and where it is constant."""

    name: str
    rate: Rate
    until_s: float = 900.0
    lengths: Lengths = chats
    mixed: tuple[int, int, int] | None = (1, 1, 8)  # at first, least, most
    prefill: tuple[int, int, int] | None = None
    decode: tuple[int, int, int] | None = None
    max_gpus: float = 8.0
    start_s: StartTime = lambda _: 30.0
    falsify: Callable[[random.Random], Falsify] | None = None
    constant: tuple[tuple[float, float], ...] = ()  # spans of constant load
    flips: bool = False  # somebody has to flip
    frozen: tuple[float, float] | None = None  # nothing may be removed here

    def run(self, seed: int, spec: WorkerSpec = SPEC) -> Scaled:
        rng = random.Random(seed)
        workload = arrivals(self.rate, self.lengths, self.until_s, rng)
        shapes = {"mixed": self.mixed, "prefill": self.prefill, "decode": self.decode}
        pools = [ElasticPool(role, *shape, spec) for role, shape in shapes.items() if shape]
        cluster = ElasticCluster(
            pools,
            Autoscaler(replace(RULES, max_gpus=self.max_gpus)),
            period_s=RULES.period_s,
            start_s=self.start_s,
            falsify=self.falsify(rng) if self.falsify else None,
            seed=seed,
        )
        return cluster.run_scaled(workload, PROMISE)


# ---------------------------------------------------------------------- what is judged


@dataclass(slots=True)
class Verdict:
    """One run. ``broken`` is empty when every promise held."""

    name: str
    seed: int
    scaled: Scaled
    broken: list[str] = field(default_factory=list)


def judge(scenario: Scenario, seed: int) -> Verdict:
    scaled = scenario.run(seed)
    verdict = Verdict(scenario.name, seed, scaled)
    lost = [o.reason for o in scaled.result.outcomes if o.reason not in FINISHED]
    if lost:
        verdict.broken.append(f"{len(lost)} requests were lost: {lost[0]}")
    if scaled.num_cut:
        verdict.broken.append(f"{scaled.num_cut} streams were cut")
    verdict.broken += _restless(scenario, scaled)
    verdict.broken += _reversals(scaled)
    verdict.broken += _slow(scaled)
    if scenario.flips and not any(event.decision.kind == FLIP for event in scaled.events):
        verdict.broken.append("nobody flipped")
    if scenario.frozen is not None:
        start, end = scenario.frozen
        gone = [e for e in scaled.events if e.decision.kind == REMOVE and start <= e.at < end]
        verdict.broken += [f"removed at {event.at:.0f} s while blind" for event in gone]
    return verdict


def _restless(scenario: Scenario, scaled: Scaled) -> Iterator[str]:
    for start, end in scenario.constant:
        settled = [event for event in scaled.events if start + SETTLE_S <= event.at < end]
        if len(settled) > MAX_SETTLED_EVENTS:
            yield f"{len(settled)} events under constant load after {start + SETTLE_S:.0f} s"


def _reversals(scaled: Scaled) -> Iterator[str]:
    """What was done is not undone within its cool-down."""
    for i, late in enumerate(scaled.events):
        for early in scaled.events[:i]:
            a, b, gap_s = early.decision, late.decision, late.at - early.at
            undone = (
                (a.kind, b.kind) == (ADD, REMOVE) and gap_s < RULES.down_cool_s,
                (a.kind, b.kind) == (REMOVE, ADD) and gap_s < RULES.up_cool_s,
                a.kind == b.kind == FLIP and a.pool == b.role and gap_s < RULES.down_cool_s,
            )
            if any(undone):
                yield f"{a.kind} at {early.at:.0f} s was undone at {late.at:.0f} s"


def _slow(scaled: Scaled) -> Iterator[str]:
    """A breach, as clients feel it, is answered within two periods, unless an answer is on its way
    or nothing is left to add."""
    was_broken = False
    answers = [at for at, d in scaled.decisions if d.kind in (ADD, FLIP, ABSORB)]
    spent = [at for at, d in scaled.decisions if "limit" in d.reason]
    for at, demand in scaled.seen:
        is_broken = max(demand.ttft_p90_ratio, demand.oldest_ratio) > 1
        last = at + REACTION_PERIODS * RULES.period_s
        if is_broken and not was_broken and last <= scaled.seen[-1][0]:
            near = any(at - RULES.start_patience_s <= t <= last for t in answers)
            if not near and not any(at <= t <= last for t in spent) and _lasts(scaled, at, last):
                yield f"no answer to the breach at {at:.0f} s"
        was_broken = is_broken


def _lasts(scaled: Scaled, at: float, until: float) -> bool:
    """A breach that is over by the second look needs no answer."""
    seen = [demand for when, demand in scaled.seen if at <= when <= until]
    return all(max(d.ttft_p90_ratio, d.oldest_ratio) > 1 for d in seen)


# ---------------------------------------------------------------------- the twelve


def _burst(t: float) -> float:
    return 10.0 if 300 <= t < 420 else 1.0


def _sine(t: float) -> float:
    return 4.0 - 3.0 * math.cos(2 * math.pi * t / 600)


def _from_zero(t: float) -> float:
    return 2.0 if 60 <= t < 240 or t >= 600 else 0.0


def _fails_twice(number: int) -> float | None:
    return None if number in (2, 3) else 30.0


def _blind(_: random.Random) -> Falsify:
    """Nobody answers for two minutes."""

    def falsify(shown: Shown, now: float) -> None:
        if 500 <= now < 620:
            shown.demand = None

    return falsify


def _stuck(_: random.Random) -> Falsify:
    """The gateway's counters stand still: nothing seems to be asked for."""

    def falsify(shown: Shown, now: float) -> None:
        if 500 <= now < 800 and shown.demand is not None:
            nothing = Window(60.0)
            shown.demand = replace(
                shown.demand,
                steady=nothing,
                recent=Window(10.0),
                num_waiting=0,
                oldest_ratio=0.0,
                ttft_p90_s=0.0,
                ttft_p90_ratio=0.0,
                num_gaps=0,
                num_late=0,
            )

    return falsify


def _noisy(rng: random.Random) -> Falsify:
    """Times of first tokens are off by a factor of three, up or down."""

    def falsify(shown: Shown, now: float) -> None:
        if shown.demand is not None:
            shown.demand = _times(shown.demand, math.exp(rng.gauss(0.0, 1.1)))

    return falsify


def _times(demand: DemandStats, factor: float) -> DemandStats:
    return replace(
        demand,
        ttft_p90_s=demand.ttft_p90_s * factor,
        ttft_p90_ratio=demand.ttft_p90_ratio * factor,
    )


def _prefill_heavy(rng: random.Random, now: float) -> tuple[int, int]:
    if now < 400:
        return chats(rng, now)
    return 500 + int(rng.expovariate(1 / 2500)), 1 + int(rng.expovariate(1 / 15))


def _decode_heavy(rng: random.Random, now: float) -> tuple[int, int]:
    if now < 400:
        return chats(rng, now)
    return 30 + int(rng.expovariate(1 / 50)), 1 + int(rng.expovariate(1 / 400))


SCENARIOS: Sequence[Scenario] = (
    Scenario("step", lambda t: 1.0 if t < 300 else 5.0, constant=((0, 300), (300, 900))),
    Scenario("ramp", lambda t: 1.0 + 5.0 * min(1.0, t / 600)),
    Scenario("burst", _burst, constant=((420, 900),), max_gpus=12.0, mixed=(1, 1, 12)),
    Scenario("sine", _sine, until_s=1500.0),
    Scenario("idle", _from_zero, mixed=(0, 0, 4), constant=((600, 900),)),
    Scenario("slow start", lambda t: 1.0 if t < 300 else 4.0, start_s=lambda _: 120.0),
    Scenario("failed start", lambda t: 1.0 if t < 300 else 3.0, start_s=_fails_twice),
    Scenario("lost metrics", lambda t: 3.0, falsify=_blind, mixed=(3, 1, 8), frozen=(500, 620)),
    Scenario("stuck counter", lambda t: 3.0, falsify=_stuck, mixed=(3, 1, 8), frozen=(500, 800)),
    Scenario("noisy TTFT", lambda t: 3.0, falsify=_noisy, mixed=(3, 1, 8), constant=((0, 900),)),
    Scenario(
        "prefill-bound",
        lambda t: 3.0 if t < 400 else 1.2,
        lengths=_prefill_heavy,
        mixed=None,
        prefill=(2, 1, 6),
        decode=(3, 1, 6),
        max_gpus=5.0,
        flips=True,
    ),
    Scenario(
        "decode-bound",
        lambda t: 3.0 if t < 400 else 12.0,
        lengths=_decode_heavy,
        mixed=None,
        prefill=(3, 1, 6),
        decode=(2, 1, 6),
        max_gpus=5.0,
        flips=True,
    ),
)
