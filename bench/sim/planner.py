"""Which cluster serves a workload best: candidates tried in virtual time, under rising load.

A plan's capacity is the highest rate of the same workload at which the wanted part of the requests
keeps both promises. One candidate finds out which load is worth trying; everybody meets that,
those that keep the target meet twice of it, and so on; the last ones standing are bisected.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bench.sim.catalogue import Gpu, Model, Times, num_pages
from bench.sim.cluster import Cluster, Pool
from bench.sim.latency import Latency
from bench.sim.outcome import Summary
from bench.sim.worker import WorkerSpec
from bench.sim.workload import Workload
from workers.core.plan import BatchShape
from workers.core.policy import Limits
from workers.core.request import SLO

MODES = ("mixed", "disaggregated", "auto")
FRACTIONS = (0.25, 0.4, 0.5, 0.6, 0.75)  # of the workers that prefill
FEW = 8  # workers, up to which every split is tried
MIN_SPAN_S = 60.0  # a run lasts at least this long, so that queues can build up
MIN_REQUESTS = 300
MAX_SEQS = 256
MAX_DOUBLINGS = 6
UNBOUNDED = 1 << 20


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
    """One plan under one load."""

    plan: Plan
    rate: float
    summary: Summary


@dataclass(slots=True)
class Candidate:
    """A plan and what was found out about it."""

    plan: Plan
    trials: list[Trial] = field(default_factory=list)  # in the order they were run
    capacity: float = 0.0  # highest rate at which it kept the target
    attainment: float = 0.0  # at the highest rate tried

    def at(self, rate: float) -> Trial:
        return next(trial for trial in self.trials if trial.rate == rate)


@dataclass(frozen=True, slots=True)
class Advice:
    """What the search found. ``best`` has the highest capacity; ``smallest`` is the smallest
    cluster of its kind that keeps the target at the workload's own rate, if any does."""

    rate: float
    best: Candidate
    by_mode: dict[str, Candidate]
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
        rate = self._workload.rate
        start = self._scout(candidates[0], rate)
        self._climb(candidates, start)
        best = max(candidates, key=_merit)
        by_mode = {
            mode: max(group, key=_merit)
            for mode in MODES
            if (group := [c for c in candidates if c.plan.mode == mode])
        }
        top = max(candidate.trials[-1].rate for candidate in by_mode.values())
        for candidate in by_mode.values():  # the same loads for all, so that curves compare
            for step in (rate, *self._ladder(start, top)):
                self._try(candidate, step)
        smallest = self._smallest(best.plan, 1.0)
        if_slower = self._smallest(best.plan, 1 + self._times(best.plan.tp).error)
        return Advice(rate, best, by_mode, smallest, if_slower, self.num_runs)

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
            splits = {
                min(max(1, round(f * workers)), workers - 1)
                for f in (FRACTIONS if few else FRACTIONS[::2])
            }
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

    def _scout(self, candidate: Candidate, rate: float) -> float:
        """The load that is worth trying on everybody: the last that one plan keeps."""
        for _ in range(MAX_DOUBLINGS):
            self._try(candidate, rate)
            if candidate.capacity != rate:
                break
            rate *= 2
        return candidate.capacity or rate

    def _climb(self, candidates: list[Candidate], rate: float) -> None:
        """Double the load until nobody keeps the target, then look between."""
        standing, low = candidates, 0.0
        for _ in range(MAX_DOUBLINGS):
            for candidate in standing:
                self._try(candidate, rate)
            kept = [c for c in standing if c.capacity == rate]
            if not kept:
                break
            standing, low, rate = kept, rate, 2 * rate
        finalists = sorted(standing, key=lambda c: c.attainment, reverse=True)[:3]
        for mode in MODES:
            ours = [c for c in standing if c.plan.mode == mode]
            finalists += [c for c in ours[:1] if all(f.plan.mode != mode for f in finalists)]
        for candidate in finalists if low else ():
            self._bisect(candidate, low, rate)

    def _bisect(self, candidate: Candidate, low: float, high: float) -> None:
        for _ in range(3):
            rate = (low + high) / 2
            self._try(candidate, rate)
            low, high = (rate, high) if candidate.capacity == rate else (low, rate)

    def _smallest(self, plan: Plan, slower: float) -> Trial | None:
        """By bisection over the number of workers."""
        low, high, found = (0 if plan.mixed else 1), plan.num_workers, None
        while low < high:
            count = high if found is None else (low + high) // 2
            if count == low:
                break
            trial = self._run(plan.with_workers(count), self._workload.rate, slower)
            if trial.summary.attainment >= self._target:
                found, high = trial, count
            elif found is None:
                return None
            else:
                low = count
        return found

    def _ladder(self, rate: float, top: float) -> Iterator[float]:
        while rate <= top:
            yield rate
            rate *= 2

    # ------------------------------------------------------------------ one run

    def _try(self, candidate: Candidate, rate: float) -> None:
        if any(trial.rate == rate for trial in candidate.trials):
            return
        trial = self._run(candidate.plan, rate)
        candidate.trials.append(trial)
        candidate.attainment = trial.summary.attainment
        if trial.summary.attainment >= self._target:
            candidate.capacity = max(candidate.capacity, rate)

    def _run(self, plan: Plan, rate: float, slower: float = 1.0) -> Trial:
        self._say(f"{plan.mode}, {plan.pools}, budget {plan.budget}, {rate:.3g} requests/s")
        self.num_runs += 1
        number = max(MIN_REQUESTS, math.ceil(rate * MIN_SPAN_S))
        workload = self._workload.first(number).at_rate(rate)
        cluster = Cluster(
            self._pools(plan, slower), mode=plan.mode, seed=self._seed, max_queue=UNBOUNDED
        )
        return Trial(plan, rate, cluster.run(workload, self._slo).summary)

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


def _merit(candidate: Candidate) -> tuple[float, float, float]:
    first = candidate.trials[0].summary
    return candidate.capacity, candidate.attainment, -first.ttft_p99_s


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
