"""Clusters that grow, shrink and change roles in virtual time, by the live autoscaler or another.

It does what ``serving.deployments.scaling`` and Ray Serve do together: it asks once a period, a
replica takes its time to start and may fail, one that goes hands its streams off first. Whoever
decides is a ``Decider``; what it is shown may be falsified, as broken metrics do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from bench.sim.cluster import DEFAULT_SLO, Cluster, Pool, Result
from bench.sim.streams import Call
from bench.sim.worker import SimWorker, WorkerSpec
from bench.sim.workload import Workload
from serving.core.capacity import StepCosts
from serving.core.demand import DemandStats
from serving.core.scaling import ADD, FLIP, HOLD, REMOVE, PoolStats, ScaleDecision, WorkerStats
from workers.core.output import Load
from workers.core.request import SLO

DRAIN_POLL_S = 0.5  # how often a worker that leaves looks whether it is empty


class Decider(Protocol):
    """``serving.core.autoscaler.Autoscaler`` is one."""

    def decide(
        self,
        pools: Sequence[PoolStats],
        demand: DemandStats | None,
        costs: StepCosts | None,
        now: float,
    ) -> ScaleDecision: ...


@dataclass(frozen=True, slots=True)
class ElasticPool:
    """A pool that may have between so many workers, and begins with ``num_workers``."""

    role: str
    num_workers: int
    min_workers: int
    max_workers: int
    spec: WorkerSpec


@dataclass(slots=True)
class Shown:
    """What the decider is shown in one period; a scenario may falsify it."""

    pools: list[PoolStats]
    demand: DemandStats | None


Falsify = Callable[[Shown, float], None]
StartTime = Callable[[int], float | None]  # of the n-th start; None: it fails, and is tried again


@dataclass(frozen=True, slots=True)
class Event:
    """A decision that changed something."""

    at: float
    decision: ScaleDecision


@dataclass(slots=True)
class Scaled:
    """What a run of an elastic cluster brought."""

    result: Result
    events: list[Event]
    decisions: list[tuple[float, ScaleDecision]]
    seen: list[tuple[float, DemandStats]]  # what was truly asked for, each period
    gpu_hours: float
    num_cut: int  # streams that lost their worker


@dataclass(slots=True, eq=False)
class _Member:
    """One worker's place in a pool."""

    name: str
    pool: ElasticPool
    worker: SimWorker | None = None  # None while it starts
    is_leaving: bool = False
    since: float = field(default=0.0)


class ElasticCluster(Cluster):
    """Build it, ``run_scaled`` once."""

    def __init__(
        self,
        pools: Sequence[ElasticPool],
        decider: Decider | None,
        *,
        period_s: float = 10.0,
        start_s: StartTime = lambda _: 30.0,
        fail_s: float = 20.0,
        falsify: Falsify | None = None,
        mode: str = "auto",
        seed: int = 0,
        on_end: Callable[[Call], None] | None = None,
    ) -> None:
        super().__init__([], mode=mode, seed=seed, on_end=on_end, holds=True, max_queue=1 << 20)
        self._elastic, self._decider = pools, decider
        self._period_s, self._start_s, self._fail_s = period_s, start_s, fail_s
        self._falsify = falsify
        self._members: list[_Member] = []
        self._targets = {pool.role: pool.num_workers for pool in pools}
        self._num_started = 0
        self._gpu_s = self._counted_at = 0.0
        self._num_ended = self._num_expected = 0
        self._last_gaps: dict[int, int] = {}
        self.events: list[Event] = []
        self.decisions: list[tuple[float, ScaleDecision]] = []
        self.seen: list[tuple[float, DemandStats]] = []

    def run_scaled(self, workload: Workload, slo: SLO = DEFAULT_SLO) -> Scaled:
        self._slo = slo
        self._num_expected = len(workload.arrivals)
        self._caches = workload.has_content
        for pool in self._elastic:
            for _ in range(pool.num_workers):
                self._ready(self._member(pool))
        if self._decider is not None:
            self.clock.after(self._period_s, self._tick)
        result = self.run(workload, slo)
        self._count_gpus()
        cut = sum(outcome.num_replays for outcome in result.outcomes)
        hours = self._gpu_s / 3600
        return Scaled(result, self.events, self.decisions, self.seen, hours, cut)

    def _ended(self, call: Call) -> None:
        super()._ended(call)
        self._num_ended += 1
        if self._num_ended == self._num_expected:
            self._count_gpus()  # what stays idle afterwards is nobody's

    # ------------------------------------------------------------------ one period

    def _tick(self) -> None:
        if self._num_ended == self._num_expected:
            return
        assert self._decider is not None
        now = self.clock.now
        self.catch_up()
        self._note_gaps()
        costs = self._costs()
        prompt_s = (costs.prompt_s,) if costs is not None else ()
        demand = self.gateway.demand.read(now, *prompt_s)
        self.seen.append((now, demand))
        shown = Shown([self._stats(pool) for pool in self._elastic], demand)
        if self._falsify is not None:
            self._falsify(shown, now)
        decision = self._decider.decide(shown.pools, shown.demand, costs, now)
        self.decisions.append((now, decision))
        if decision.is_event:
            self.events.append(Event(now, decision))
            self._carry_out(decision)
        self.clock.after(self._period_s, self._tick)

    def _note_gaps(self) -> None:
        """What the live gateway counts gap by gap."""
        counts, before = self.gateway.gaps.counts, self._last_gaps
        late = int(math.log(self._slo.itl_s / 1e-6) / math.log(1.005))
        new = {b: num - before.get(b, 0) for b, num in counts.items()}
        num_late = sum(num for bucket, num in new.items() if bucket > late)
        self.gateway.demand.gaps(sum(new.values()), num_late)
        self._last_gaps = dict(counts)

    def _stats(self, pool: ElasticPool) -> PoolStats:
        workers = tuple(
            WorkerStats(m.worker.id, m.worker.role, m.worker.load())
            for m in self._members
            if m.pool is pool and m.worker is not None and not m.is_leaving
        )
        bounds = pool.min_workers, pool.max_workers, self._targets[pool.role]
        return PoolStats(pool.role, pool.role, *bounds, workers)

    def _costs(self) -> StepCosts | None:
        """Of the worker that has learned most; None until one has learned enough to say so."""
        workers = [member.worker for member in self._members if member.worker is not None]
        best = max(workers, key=lambda worker: worker.num_steps, default=None)
        if best is None or not best.pace().is_measured:
            return None
        spec = best.spec
        return StepCosts.of(best.pace(), spec.num_pages * spec.layout.page_size)

    def _carry_out(self, decision: ScaleDecision) -> None:
        if decision.kind == FLIP:
            self.gateway.set_role(decision.worker, decision.role)
            return
        pool = next(pool for pool in self._elastic if pool.role == decision.pool)
        self._targets[pool.role] = decision.target
        staying = [m for m in self._members if m.pool is pool and not m.is_leaving]
        for _ in range(decision.target - len(staying)):
            self._begin(self._member(pool))
        # As Serve: those that do not run yet go first, then the newest.
        ranked = sorted(staying, key=lambda m: (m.worker is None, m.since), reverse=True)
        for member in ranked[: max(0, len(staying) - decision.target)]:
            self._remove(member)

    # ------------------------------------------------------------------ a worker's life

    def _member(self, pool: ElasticPool) -> _Member:
        self._count_gpus()
        name = f"{pool.role}-{self._num_started}"
        self._num_started += 1
        member = _Member(name, pool, since=self.clock.now)
        self._members.append(member)
        return member

    def _begin(self, member: _Member) -> None:
        start_s = self._start_s(self._num_started)
        if start_s is None:
            self.clock.after(self._fail_s, self._try_again, member)
        else:
            self.clock.after(start_s, self._ready, member)

    def _try_again(self, member: _Member) -> None:
        if not member.is_leaving and self._num_ended < self._num_expected:
            self._num_started += 1
            self._begin(member)

    def _ready(self, member: _Member) -> None:
        if member.is_leaving:
            return
        spec = member.pool.spec
        if not self._caches:
            spec = replace(spec, prefix_caching=False)
        self._start(member.name, Pool(member.pool.role, 1, spec), 0)
        member.worker = self.workers[member.name]

    def _remove(self, member: _Member) -> None:
        member.is_leaving = True
        if member.worker is None:
            self._gone(member)
        else:
            self.gateway.retire(member.name)
            self._drain(member)

    def _drain(self, member: _Member) -> None:
        if self.gateway.detach(member.name):
            self.dead.append(self.workers.pop(member.name))
            self._gone(member)
        else:
            self.clock.after(DRAIN_POLL_S, self._drain, member)

    def _gone(self, member: _Member) -> None:
        self._count_gpus()
        self._members.remove(member)

    def _count_gpus(self) -> None:
        """Every GPU counts from when it is asked for until it is empty."""
        now = self.clock.now
        gpus = sum(member.pool.spec.num_gpus for member in self._members)
        self._gpu_s += gpus * (now - self._counted_at)
        self._counted_at = now


class QueueLength:
    """Ray Serve's default policy for one pool (``ray.serve.autoscaling_policy``, 2.60): replicas =
    ongoing requests, queued ones counted, over a target, meaned over 30 s; up after 30 s, down
    after 600 s of wanting it."""

    UP_DELAY_S, DOWN_DELAY_S, LOOK_BACK_S = 30.0, 600.0, 30.0

    def __init__(self, target_ongoing: float = 2.0) -> None:
        self._target = target_ongoing
        self._series: list[tuple[float, int]] = []
        self._up_since: float | None = None
        self._down_since: float | None = None

    def decide(
        self,
        pools: Sequence[PoolStats],
        demand: DemandStats | None,
        costs: StepCosts | None,
        now: float,
    ) -> ScaleDecision:
        (pool,) = pools
        self._series.append((now, _ongoing(pool.workers, demand)))
        self._series = [(at, n) for at, n in self._series if at > now - self.LOOK_BACK_S]
        mean = sum(n for _, n in self._series) / len(self._series)
        wanted = math.ceil(mean / self._target - 1e-9)
        wanted = max(pool.min_workers, min(pool.max_workers, wanted))
        self._up_since = (self._up_since or now) if wanted > pool.target else None
        self._down_since = (self._down_since or now) if wanted < pool.target else None
        reason = f"{mean:.1f} ongoing requests, {self._target:g} for each replica"
        if self._up_since is not None and now - self._up_since >= self.UP_DELAY_S:
            self._up_since = None
            return ScaleDecision(ADD, reason, pool.name, wanted)
        if self._down_since is not None and now - self._down_since >= self.DOWN_DELAY_S:
            self._down_since = None
            return ScaleDecision(REMOVE, reason, pool.name, wanted)
        return ScaleDecision(HOLD, reason)


def _ongoing(workers: Sequence[WorkerStats], demand: DemandStats | None) -> int:
    def ongoing(load: Load) -> int:
        return load.waiting_seqs + load.running_seqs

    running = sum(ongoing(worker.load) for worker in workers)
    return max(running, demand.num_waiting if demand is not None else 0)
