"""Which cluster serves a workload best: candidates tried in virtual time, under rising load.

A plan's capacity is the highest rate of the same workload at which the wanted part of the requests
keeps both promises. All plans race on the same slices of the trace (so what differs is the plan,
not the luck): short slices for all of them, longer ones for the better half, and so on. A run ends
as soon as its verdict is sure. What is left, one plan of each mode at least, is compared on further
slices, which say how sure the comparison is.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from bench.sim.catalogue import Gpu, Model, Times, num_pages
from bench.sim.cluster import Cluster, Pool
from bench.sim.gateway import UNBOUNDED
from bench.sim.latency import Latency
from bench.sim.outcome import Summary
from bench.sim.worker import WorkerSpec
from bench.sim.workload import Workload
from workers.core.plan import BatchShape
from workers.core.policy import Limits
from workers.core.request import SLO

MODES = ("mixed", "disaggregated", "auto")
FRACTIONS = (0.25, 0.4, 0.5, 0.6, 0.75)  # of the workers that prefill
FEW = 8  # workers, up to which two tensor-parallel sizes are tried
STEP = 2**0.125  # between neighbouring rates
MAX_STEPS = 48  # from the trace's own rate
MIN_REQUESTS, MAX_REQUESTS = 150, 500  # of a run
NUM_SLICES = 4  # for the last comparison
COMPARE_S = 20.0  # of load in each
LADDER = (0.5, 0.8, 1.25)  # of the best capacity: drawn beside 1
MAX_SEQS = 256
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}  # Student's t by degrees of freedom


@dataclass(frozen=True, slots=True)
class Round:
    """Of the race: how much load each run gets, and how finely rates are told apart."""

    span_s: float
    stride: int  # STEPs, first
    finest: int  # and last
    max_runs: int  # for each plan


ROUNDS = (Round(6.0, 4, 2, 4), Round(12.0, 2, 2, 3), Round(30.0, 2, 1, 4))


@dataclass(frozen=True, slots=True)
class Plan:
    """Pools of equal workers, their step budget, and how requests are routed."""

    mode: str
    tp: int
    mixed: int
    prefill: int
    decode: int
    budget: int

    @property
    def num_workers(self) -> int:
        return self.mixed + self.prefill + self.decode

    @property
    def num_gpus(self) -> int:
        return self.tp * self.num_workers

    @property
    def pools(self) -> str:
        if self.mixed:
            return f"{self.mixed} mixed"
        return f"{self.prefill} prefill + {self.decode} decode"

    def with_workers(self, count: int) -> "Plan":
        """The same kind of plan with another number of workers."""
        if self.mixed:
            return replace(self, mixed=count)
        prefill = round(count * self.prefill / self.num_workers)
        prefill = min(max(1, prefill), count - 1)
        return replace(self, prefill=prefill, decode=count - prefill)


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan under one load. One that was given up, because it could not keep the target any
    more, has no figures worth reading."""

    plan: Plan
    rate: float
    summary: Summary
    is_whole: bool

    def keeps(self, target: float) -> bool:
        return self.is_whole and self.summary.attainment >= target


@dataclass(slots=True)
class Candidate:
    """A plan and what was found out about it."""

    plan: Plan
    step: int = 0  # of the highest rate at which it kept the target, in the last round it was in
    capacity: float = 0.0  # that rate; 0 when there is none
    attainment: float = 0.0  # there
    trials: list[Trial] = field(default_factory=list)  # whole ones on the first slice
    slices: list[float] = field(default_factory=list)  # attainment in the last comparison

    @property
    def merit(self) -> tuple[float, float, float]:
        """The higher the better."""
        return self.capacity, fmean(self.slices or [0.0]), self.attainment

    def at(self, rate: float) -> Trial:
        return next(trial for trial in self.trials if trial.rate == rate)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over slices of the trace, and how far off it may be in 95 of 100 cases."""

    mean: float
    within: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        if len(values) < 2:
            return cls(fmean(values), math.nan)
        error = stdev(values) / math.sqrt(len(values))
        return cls(fmean(values), T_95[min(5, len(values) - 1)] * error)


@dataclass(frozen=True, slots=True)
class Confidence:
    """At the best plan's capacity, on slices that the race did not decide by."""

    rate: float
    num_slices: int
    kept: Estimate  # by the best plan
    rival: str  # the best mode but one; empty when there is only one
    lead: Estimate  # of the kept part over the rival's, slice by slice
    num_won: int  # slices in which the best plan kept no less


@dataclass(frozen=True, slots=True)
class Advice:
    """What the search found. ``best`` has the highest capacity; ``smallest`` is the smallest
    cluster of its kind that keeps the target at the workload's own rate, if any does."""

    rate: float
    best: Candidate
    by_mode: dict[str, Candidate]
    confidence: Confidence
    smallest: Trial | None
    if_slower: Trial | None  # the smallest when every step takes longer by its source's error
    num_runs: int


@dataclass(frozen=True, slots=True)
class Slower:
    """Another model's steps, all of them slower by ``factor``."""

    latency: Latency
    factor: float

    def step_s(self, shape: BatchShape) -> float:
        return self.factor * self.latency.step_s(shape)

    def transfer_s(self, num_bytes: int, pair: str = "") -> float:
        return self.latency.transfer_s(num_bytes, pair)


class Planner:
    """``say`` gets a line about each run before it starts."""

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        times: Callable[[int], Times],
        workload: Workload,
        slo: SLO,
        num_gpus: int,
        *,
        target: float = 0.9,
        seed: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._model, self._gpu, self._times = model, gpu, times
        self._workload, self._slo, self._num_gpus = workload, slo, num_gpus
        self._target, self._seed, self._say = target, seed, say
        mean = sum(a.num_prompt for a in workload.arrivals) / max(1, len(workload.arrivals))
        self._context = mean
        self._page_size = 128 if mean > 2000 else 64  # coarse: fewer pages to keep account of
        self.num_runs = 0

    # ------------------------------------------------------------------ the search

    def search(self) -> Advice:
        """Raises ValueError when no worker holds the model."""
        candidates = [Candidate(plan) for plan in self.plans()]
        if not candidates:
            raise ValueError(
                f"{self._num_gpus} {self._gpu.name} do not hold {self._model.name}, or none of "
                f"the requests fits beside it"
            )
        champions = self._race(candidates)
        rate = max(c.capacity for c in champions) or self._workload.rate
        for candidate in champions:
            self._draw(candidate, rate)
        best = max(champions, key=lambda c: c.merit)
        smallest = self._smallest(best.plan, 1.0)
        if_slower = self._smallest(best.plan, 1 + self._times(best.plan.tp).error)
        by_mode = {c.plan.mode: c for c in champions}
        confidence = _compare(best, champions, rate)
        own = self._workload.rate
        return Advice(own, best, by_mode, confidence, smallest, if_slower, self.num_runs)

    def plans(self) -> Iterator[Plan]:
        """Every mode, three budgets, some splits, and the smallest tensor-parallel sizes that fit:
        two of them where workers are few."""
        longest = max(a.num_prompt + a.num_output for a in self._workload.arrivals)
        sizes = [tp for tp in (1, 2, 4, 8) if tp <= self._num_gpus]
        fitting = [tp for tp in sizes if self._tokens(tp) >= longest]
        few = bool(fitting) and self._num_gpus // fitting[0] <= FEW
        for tp in fitting[: 2 if few else 1]:
            workers = self._num_gpus // tp
            for budget in self._budgets(tp):
                yield Plan("mixed", tp, workers, 0, 0, budget)
            splits = {min(max(1, round(f * workers)), workers - 1) for f in FRACTIONS}
            for prefill in sorted(splits) if workers > 1 else ():
                decode = workers - prefill
                yield Plan("disaggregated", tp, 0, prefill, decode, 8192)
                yield Plan("auto", tp, 0, prefill, decode, self._budgets(tp)[-1])

    def _budgets(self, tp: int) -> list[int]:
        """The largest whose step with some decodes keeps the ITL promise, half of it, and more."""
        latency, context = self._times(tp).latency, self._context
        best = 128
        while best < 8192:
            budget = 2 * best
            shape = BatchShape(budget, int(budget * context / 2), 32, int(32 * context))
            if latency.step_s(shape) > 0.9 * self._slo.itl_s:
                break
            best = budget
        return sorted({max(64, best // 2), best, min(8192, best * 2)})

    def _race(self, candidates: list[Candidate]) -> list[Candidate]:
        """The best plan of each mode."""
        scout = candidates[0]
        self._climb(scout, Round(ROUNDS[0].span_s, 8, 4, 6), 0)
        for candidate in candidates:
            candidate.step = scout.step
        for number, round in enumerate(ROUNDS):
            for candidate in candidates:
                self._climb(candidate, round, number)
            candidates = _better_half(candidates)
        return [_best_of(candidates, mode) for mode in MODES if _modes(candidates) >= {mode}]

    def _climb(self, candidate: Candidate, round: Round, slice: int) -> None:
        """Find its capacity: from where it was seen last, in strides until they fail (or until they
        do not), then between."""
        low, high, step = -MAX_STEPS, MAX_STEPS, candidate.step
        candidate.capacity = candidate.attainment = 0.0
        stride = round.stride
        for _ in range(round.max_runs):
            rate = self._workload.rate * STEP**step
            trial = self._run(candidate.plan, rate, round.span_s, slice, gives_up=True)
            if trial.keeps(self._target):
                low, candidate.capacity = step, rate
                candidate.attainment = trial.summary.attainment
            else:
                high = step
            candidate.step = low if candidate.capacity else high - stride
            if high - low <= round.finest:
                return
            if low > -MAX_STEPS and high < MAX_STEPS:
                step = (low + high) // 2
            else:
                step += stride if low > -MAX_STEPS else -stride

    def _draw(self, candidate: Candidate, top: float) -> None:
        """The same loads for everybody who is left: so that curves compare, and the best rate on
        several slices, so that plans do."""
        for rate in (self._workload.rate, *(part * top for part in LADDER)):
            candidate.trials.append(self._run(candidate.plan, rate, COMPARE_S, 0))
        for slice in range(NUM_SLICES):
            trial = self._run(candidate.plan, top, COMPARE_S, slice)
            candidate.slices.append(trial.summary.attainment)
            if slice == 0 and top != self._workload.rate:
                candidate.trials.append(trial)

    def _smallest(self, plan: Plan, slower: float) -> Trial | None:
        """By bisection over the number of workers."""
        low, high, found = (0 if plan.mixed else 1), plan.num_workers, None
        while low < high:
            count = high if found is None else (low + high) // 2
            if count == low:
                break
            fewer, rate = plan.with_workers(count), self._workload.rate
            trial = self._run(fewer, rate, 2 * COMPARE_S, 0, slower, gives_up=True)
            if trial.keeps(self._target):
                found, high = trial, count
            elif found is None:
                return None
            else:
                low = count
        return found

    # ------------------------------------------------------------------ one run

    def _run(
        self,
        plan: Plan,
        rate: float,
        span_s: float,
        slice: int,
        slower: float = 1.0,
        gives_up: bool = False,
    ) -> Trial:
        self._say(f"{plan.mode}, {plan.pools}, budget {plan.budget}, {rate:.3g} requests/s")
        self.num_runs += 1
        num_requests = min(MAX_REQUESTS, max(MIN_REQUESTS, math.ceil(rate * span_s)))
        workload = self._slice(num_requests, slice).at_rate(rate)
        limit = int((1 - self._target) * len(workload.arrivals)) if gives_up else None
        cluster = Cluster(
            self._pools(plan, slower),
            mode=plan.mode,
            seed=self._seed,
            max_queue=UNBOUNDED,
            max_broken=limit,
        )
        result = cluster.run(workload, self._slo)
        return Trial(plan, rate, result.summary, not cluster.gave_up)

    def _slice(self, num_requests: int, number: int) -> Workload:
        """The first one begins with the trace, the last one ends with it."""
        room = max(0, len(self._workload.arrivals) - num_requests)
        start = room * (number % NUM_SLICES) // (NUM_SLICES - 1)
        return self._workload.part(start, start + num_requests)

    def _pools(self, plan: Plan, slower: float) -> list[Pool]:
        times = self._times(plan.tp)
        spec = WorkerSpec(
            Slower(times.latency, slower) if slower != 1.0 else times.latency,
            Limits(plan.budget, MAX_SEQS),
            num_pages(self._model, self._gpu, plan.tp, self._page_size),
            self._model.layout(self._page_size),
            self._model.max_model_len,
            host_s=times.host_s,
            num_gpus=plan.tp,
        )
        counts = {"mixed": plan.mixed, "prefill": plan.prefill, "decode": plan.decode}
        return [Pool(role, count, spec) for role, count in counts.items() if count]

    def _tokens(self, tp: int) -> int:
        pages = num_pages(self._model, self._gpu, tp, self._page_size)
        return min(pages * self._page_size, self._model.max_model_len)


def usual_runs(num_plans: int) -> int:
    """About how many runs a search takes."""
    race, left = 4, num_plans
    for round in ROUNDS:
        race += left * (round.max_runs - 1)
        left = max(len(MODES), math.ceil(left / 2))
    return race + len(MODES) * (1 + len(LADDER) + NUM_SLICES) + 2 * 4


def _modes(candidates: list[Candidate]) -> set[str]:
    return {candidate.plan.mode for candidate in candidates}


def _best_of(candidates: list[Candidate], mode: str) -> Candidate:
    return max((c for c in candidates if c.plan.mode == mode), key=lambda c: c.merit)


def _better_half(candidates: list[Candidate]) -> list[Candidate]:
    """And the best of each mode, if it is not among them."""
    ranked = sorted(candidates, key=lambda c: c.merit, reverse=True)
    kept = ranked[: math.ceil(len(ranked) / 2)]
    return kept + [_best_of(ranked, mode) for mode in sorted(_modes(ranked) - _modes(kept))]


def _compare(best: Candidate, champions: list[Candidate], rate: float) -> Confidence:
    kept = Estimate.of(best.slices)
    rivals = [c for c in champions if c is not best]
    if not rivals:
        return Confidence(rate, len(best.slices), kept, "", Estimate(0.0, 0.0), 0)
    rival = max(rivals, key=lambda c: c.merit)
    leads = [ours - theirs for ours, theirs in zip(best.slices, rival.slices, strict=True)]
    num_won = sum(lead >= 0 for lead in leads)
    mode, lead = rival.plan.mode, Estimate.of(leads)
    return Confidence(rate, len(leads), kept, mode, lead, num_won)


def config_of(plan: Plan, slo: SLO) -> dict[str, Any]:
    """Keys of ``evenflow serve --config``."""
    return {
        "mixed": plan.mixed,
        "prefill": plan.prefill,
        "decode": plan.decode,
        "max_num_batched_tokens": plan.budget,
        "max_num_seqs": MAX_SEQS,
        "slo": {"ttft": f"{slo.ttft_s * 1000:g}ms", "itl": f"{slo.itl_s * 1000:g}ms"},
    }
