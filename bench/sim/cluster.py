"""A cluster in virtual time: one clock, workers, links, a gateway, and what goes wrong."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from bench.sim.clock import Clock
from bench.sim.faults import NO_FAULTS, Faults
from bench.sim.gateway import Channel, SimGateway
from bench.sim.links import SimLinks
from bench.sim.outcome import Gaps, Outcome, Summary, summarize
from bench.sim.streams import Call
from bench.sim.worker import SimWorker, StepReport, WorkerSpec
from bench.sim.workload import Arrival, Workload
from serving.core.router import AUTO
from workers.core.request import SLO, Request, Sampling

DEFAULT_SLO = SLO()


@dataclass(frozen=True, slots=True)
class Pool:
    """So many workers of one kind. A role is "mixed", "prefill" or "decode"."""

    role: str
    num_workers: int
    spec: WorkerSpec


@dataclass(frozen=True, slots=True)
class Result:
    """What a run brought."""

    outcomes: list[Outcome]
    gaps: Gaps
    summary: Summary
    num_events: int

    def to_json(self) -> str:
        """All of it, the same bytes for the same seed."""
        rows = "\n".join(repr(asdict(outcome)) for outcome in self.outcomes)
        return f"{self.summary.to_json()}\n{sorted(self.gaps.counts.items())}\n{rows}\n"


class Cluster:
    """Build it, ``run`` a workload once, look at the result."""

    def __init__(
        self,
        pools: Sequence[Pool],
        *,
        mode: str | Callable[[Request], str] = AUTO,
        faults: Faults = NO_FAULTS,
        seed: int = 0,
        max_queue: int = 256,
        skips: bool | None = None,
        max_broken: int | None = None,
        on_end: Callable[[Call], None] | None = None,
        holds: bool = False,
        sees_all: bool = False,
    ) -> None:
        self.clock = Clock()
        self.workers: dict[str, SimWorker] = {}  # alive
        self.dead: list[SimWorker] = []
        self._answers: dict[str, Channel] = {}  # from each worker to the gateway
        self._faults, self._rng, self._seed = faults, random.Random(seed), seed
        self._links = SimLinks(self.clock, self.workers, faults, self._rng)
        self._on_end = on_end
        self.gateway = SimGateway(
            self.clock,
            faults,
            self._rng,
            mode=mode,
            max_queue=max_queue,
            ended=self._ended,
            holds=holds,
            sees_all=sees_all,
        )
        self._num_gpus = sum(pool.num_workers * pool.spec.num_gpus for pool in pools)
        self._outcomes: list[Outcome] = []
        self._max_broken = max_broken  # requests without what they were promised: enough is known
        self._num_broken = self._num_judged = 0
        self.gave_up = False
        self._last_arrival = 0.0
        if skips is None:
            skips = faults == NO_FAULTS
        self._skips = skips  # quiet steps, where nothing else can look in between
        self._pools = [
            (f"{pool.role}-{i}", pool) for pool in pools for i in range(pool.num_workers)
        ]

    def run(
        self,
        workload: Workload,
        slo: SLO = DEFAULT_SLO,
        progress: Callable[[float], None] | None = None,
    ) -> Result:
        """Until every request has ended. ``progress`` gets the part of the arrivals so far."""
        arrivals = workload.arrivals
        self._last_arrival = arrivals[-1].at_s if arrivals else 0.0
        if not workload.has_content:  # nothing is ever found: spare the looking
            self._pools = [(name, _without_cache(pool)) for name, pool in self._pools]
        for name, pool in self._pools:
            self._start(name, pool, 0)
        self._next(workload, slo, 0, progress)
        self.clock.run()
        return self._result()

    def catch_up(self) -> None:
        """Before somebody looks at all workers: those that skip quiet steps see to what has passed
        of them."""
        if self._skips:
            for worker in self.workers.values():
                worker.catch_up()

    # ------------------------------------------------------------------ requests

    def _next(
        self,
        workload: Workload,
        slo: SLO,
        index: int,
        progress: Callable[[float], None] | None,
    ) -> None:
        """One arrival is on the clock at a time, so that a day of them takes no memory."""
        if index < len(workload.arrivals):
            arrival = workload.arrivals[index]
            self.clock.at(arrival.at_s, self._arrive, workload, slo, index, progress)
        if progress is not None and index % 256 == 0:
            progress(index / max(1, len(workload.arrivals)))

    def _arrive(
        self,
        workload: Workload,
        slo: SLO,
        index: int,
        progress: Callable[[float], None] | None,
    ) -> None:
        arrival = workload.arrivals[index]
        outcome = Outcome(arrival.at_s, arrival.num_prompt, slo)
        self._outcomes.append(outcome)
        request = self._request(workload, arrival, slo, index)
        if self._faults.aborts and self._rng.random() < self._faults.aborts:
            patience_s = self._rng.random() * self._faults.max_patience_s
            self.clock.after(patience_s, self.gateway.leave, request.id)
        if self._max_broken is not None:
            self._judge()
        self.gateway.arrive(request, outcome)
        self._next(workload, slo, index + 1, progress)

    def _request(self, workload: Workload, arrival: Arrival, slo: SLO, index: int) -> Request:
        sampling = Sampling(max_tokens=arrival.num_output, seed=self._seed * 1_000_003 + index)
        salt = "" if arrival.blocks else str(index)  # without names it shares with nobody
        return Request(
            str(index), workload.prompt(arrival), sampling, slo, arrival.at_s, cache_salt=salt
        )

    def _judge(self) -> None:
        """Whose first token is late by now?"""
        now, outcomes = self.clock.now, self._outcomes
        while self._num_judged < len(outcomes):
            outcome = outcomes[self._num_judged]
            if outcome.arrived_at + outcome.slo.ttft_s >= now:
                break
            self._num_judged += 1
            is_late = not outcome.first_at or outcome.ttft_s > outcome.slo.ttft_s
            self._break(is_late)

    def _break(self, is_broken: bool) -> None:
        self._num_broken += is_broken
        if self._max_broken is not None and self._num_broken > self._max_broken:
            self.gave_up = True
            self.clock.stop()

    def _ended(self, call: Call) -> None:
        self._break(call.outcome.is_in_time and not call.outcome.is_even)
        if self._on_end is not None:
            self._on_end(call)

    # ------------------------------------------------------------------ workers

    def _start(self, name: str, pool: Pool, life: int) -> None:
        id = f"{name}.{life}" if life else name
        worker = SimWorker(
            id, pool.role, pool.spec, self.clock, self._links, self._report, self._skips
        )
        self.workers[id] = worker
        self._answers[id] = Channel(self.clock, self._faults, self._rng)
        self.gateway.attach(worker)
        if self._faults.mean_life_s:
            self.clock.after(self._faults.life_s(self._rng), self._kill, name, pool, life, worker)

    def _report(self, worker: SimWorker, note: StepReport) -> None:
        self._answers[worker.id].send(self.gateway.heard, worker.id, note)

    def _kill(self, name: str, pool: Pool, life: int, worker: SimWorker) -> None:
        if self.clock.now > self._last_arrival:
            return
        worker.die()
        del self.workers[worker.id]
        self.dead.append(worker)
        self.clock.after(self._faults.detect_s, self.gateway.lose, worker.id)
        self.clock.after(self._faults.restart_s, self._start, name, pool, life + 1)

    # ------------------------------------------------------------------ the result

    def _result(self) -> Result:
        everyone = [*self.workers.values(), *self.dead]
        loads = [worker.load() for worker in everyone]
        span_s = max(self.clock.now, 1e-9)
        summary = summarize(
            self._outcomes,
            self.gateway.gaps,
            num_gpus=self._num_gpus,
            busy=sum(worker.busy_s for worker in everyone) / span_s / max(1, len(self._pools)),
            num_preemptions=sum(load.num_preemptions for load in loads),
            cached_tokens=sum(load.cached_tokens for load in loads),
        )
        return Result(self._outcomes, self.gateway.gaps, summary, self.clock.num_events)


def _without_cache(pool: Pool) -> Pool:
    return replace(pool, spec=replace(pool.spec, prefix_caching=False))
