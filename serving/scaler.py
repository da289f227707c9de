"""Clocks 3 and 4 live: once a period, ask the autoscaler and do what it says.

It gathers what the gateway knows of its workers and of what is asked for, and says why something
changed: in the log, the metrics, the state store and the status. Of several gateways the one that
leads does so. It refuses to know how a replica is started: ``Replicas`` does.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from serving.core.autoscaler import Autoscaler
from serving.core.capacity import StepCosts
from serving.core.scaling import (
    ADD,
    FLIP,
    HOLD,
    REMOVE,
    PoolStats,
    ScaleDecision,
    ScaleRules,
    WorkerStats,
)
from serving.errors import BadRequest, NotFound, RequestFailed
from serving.gateway import Gateway
from serving.pools import WorkerView
from serving.state import StateStore

KEPT = 20  # decisions that are shown
LOG_TTL_S = 86400.0  # how long the store remembers a change

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolRange:
    """How many workers a pool may have."""

    role: str
    min_workers: int
    max_workers: int


class Replicas(Protocol):
    """Who starts and stops workers."""

    async def targets(self) -> Mapping[str, int]:
        """How many workers each pool was told to have."""
        ...

    async def set_target(self, pool: str, num: int) -> None:
        """From now on. Which of them go is not ours to say."""
        ...


class Scaler:
    """``run`` in a task of its owner; ``scale`` is for people."""

    def __init__(
        self,
        gateway: Gateway,
        replicas: Replicas,
        ranges: Mapping[str, PoolRange],
        rules: ScaleRules,
        store: StateStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway, self._replicas, self._store = gateway, replicas, store
        self._ranges, self._rules, self._clock = ranges, rules, clock
        self._autoscaler = Autoscaler(rules)
        self._targets: dict[str, int] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._last: ScaleDecision | None = None

    async def run(self) -> None:
        """For ever. An error of one period is logged, and the next one begins."""
        while True:
            await asyncio.sleep(self._rules.period_s)
            try:
                await self.step()
            except RequestFailed as error:
                log.warning("scaling: %s", error)
            except Exception:
                log.exception("scaling: this period is left out")

    async def step(self) -> ScaleDecision:
        """One period."""
        now = self._clock()
        if not self._gateway.peers.leads:
            return self._stand_by(now)
        if not self._targets or not self._gateway.peers.is_alone:  # others may be asked to scale
            self._targets = dict(await self._replicas.targets())
        views = [view for view in self._gateway.pools.workers() if not view.is_leaving]
        pools = [self._stats(name, views) for name in self._ranges]
        costs = _costs(views)
        prompt_s = (costs.prompt_s,) if costs is not None else ()
        demand = self._gateway.demand.read(now, *prompt_s)
        decision = self._autoscaler.decide(pools, demand, costs, now)
        self._gateway.metrics.scale_decided(decision.kind)
        self._last = decision
        if decision.is_event:
            log.warning("scaling: %s: %s", _what(decision), decision.reason)
            await self._carry_out(decision)
            await self._write_down(decision)
        return decision

    def _stand_by(self, now: float) -> ScaleDecision:
        """Another gateway leads. Whoever takes over begins anew, with what is there by then."""
        self._gateway.demand.read(now)
        self._targets, self._autoscaler = {}, Autoscaler(self._rules)
        self._last = ScaleDecision(HOLD, "another gateway, which has been there longer, scales")
        return self._last

    async def scale(self, pool: str, num: int) -> None:
        """As a person asks, within the pool's range; the autoscaler goes on from there. NotFound,
        BadRequest."""
        bounds = self._ranges.get(pool)
        if bounds is None:
            raise NotFound(f"no pool {pool[:128]!r} can be scaled")
        if not bounds.min_workers <= num <= bounds.max_workers:
            between = f"{bounds.min_workers} and {bounds.max_workers}"
            raise BadRequest(f"{num} is not between {between}", "workers")
        if not self._targets:
            self._targets = dict(await self._replicas.targets())
        kind = ADD if num >= self._targets[pool] else REMOVE
        decision = ScaleDecision(kind, "somebody asked for it", pool, num)
        await self._carry_out(decision)
        await self._write_down(decision)

    def status(self) -> dict[str, Any]:
        """What is wanted, what was decided last, and what changed lately, newest first."""
        return {
            "targets": dict(self._targets),
            "now": asdict(self._last) if self._last is not None else None,
            "changes": list(self._recent),
        }

    async def _carry_out(self, decision: ScaleDecision) -> None:
        if decision.kind == FLIP:
            await self._gateway.moves.set_role(decision.worker, decision.role)
        else:
            await self._replicas.set_target(decision.pool, decision.target)
            self._targets[decision.pool] = decision.target

    async def _write_down(self, decision: ScaleDecision) -> None:
        at = time.time()
        change = {"at": round(at, 3), "what": _what(decision), **asdict(decision)}
        self._recent.appendleft(change)
        await self._store.set(f"scaling:{int(at * 1000):015d}", change, LOG_TTL_S)

    def _stats(self, name: str, views: list[WorkerView]) -> PoolStats:
        bounds = self._ranges[name]
        workers = tuple(
            WorkerStats(view.id, view.role, view.load) for view in views if pool_of(view.id) == name
        )
        limits = bounds.min_workers, bounds.max_workers
        return PoolStats(name, bounds.role, *limits, self._targets.get(name, len(workers)), workers)


def pool_of(worker_id: str) -> str:
    """A worker's name begins with its pool's, whatever its role is now."""
    return worker_id.partition("-")[0]


def _costs(views: list[WorkerView]) -> StepCosts | None:
    """Of the slowest worker that has measured its steps: none is promised what it cannot do."""
    known = [view for view in views if view.pace is not None and view.pace.is_measured]
    costs = [
        StepCosts.of(view.pace, view.num_pages * view.page_size)
        for view in known
        if view.pace is not None
    ]
    return max(costs, key=lambda c: c.fixed_s + c.prompt_s(512), default=None)


def _what(decision: ScaleDecision) -> str:
    if decision.kind == FLIP:
        return f"{decision.worker} is {decision.role} now"
    return f"{decision.pool}: {decision.target} workers"
