"""What the autoscaler is told, what it may do, and what it answers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serving.core.capacity import Fleet, Pressure
from workers.core.output import Load

HOLD, ABSORB, FLIP, ADD, REMOVE = "hold", "absorb", "flip", "add", "remove"
MIXED, PREFILL, DECODE = "mixed", "prefill", "decode"
NONE = Pressure()


@dataclass(frozen=True, slots=True)
class ScaleRules:
    """What the operator may choose."""

    max_gpus: float = 1e9
    gpus_per_worker: float = 1.0
    period_s: float = 10.0
    down_cool_s: float = 120.0  # after anything was added or flipped
    settle_s: float = 60.0  # after these, before predictions are called wrong
    up_cool_s: float = 20.0  # after something was removed
    flip_cool_s: float = 30.0
    stable_s: float = 300.0  # what is looked back on before a worker goes
    start_patience_s: float = 180.0  # a replica that is not there by then is not counted on
    stale_s: float = 15.0  # a worker that says nothing for so long is unknown
    max_step: int = 4  # replicas in one decision
    max_events: int = 20  # in ten minutes
    flips: bool = True


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker that has started."""

    id: str
    role: str
    load: Load
    silent_s: float = 0.0  # since it was last heard


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool: how many workers it was told to have, and those that are there."""

    name: str
    role: str  # in which its workers start
    min_workers: int
    max_workers: int
    target: int
    workers: tuple[WorkerStats, ...] = ()

    @property
    def num_starting(self) -> int:
        return max(0, self.target - len(self.workers))


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """What to do, and why in plain words."""

    kind: str
    reason: str
    pool: str = ""  # to add to, or to remove from
    target: int = 0  # workers of that pool from now on
    worker: str = ""  # to flip
    role: str = ""
    now: Pressure = NONE
    after: Pressure = NONE

    @property
    def is_event(self) -> bool:
        return self.kind in (FLIP, ADD, REMOVE)


class View:
    """The pools at one moment."""

    def __init__(
        self,
        pools: Sequence[PoolStats],
        rules: ScaleRules,
        unknown: list[str],
        counted: dict[str, int],
    ) -> None:
        self.pools, self.unknown, self.counted, self._rules = pools, unknown, counted, rules
        known = Counter(worker.role for worker in self.workers() if worker.id not in unknown)
        for pool in pools:
            known[pool.role] += counted[pool.name]
        self.fleet = Fleet(known[PREFILL], known[DECODE], known[MIXED])
        self.queued_tokens = sum(worker.load.queued_tokens for worker in self.workers())
        self.num_queued = sum(worker.load.waiting_seqs for worker in self.workers())

    def workers(self) -> Iterable[WorkerStats]:
        return (worker for pool in self.pools for worker in pool.workers)

    def growable(self) -> list[PoolStats]:
        return [pool for pool in self.pools if self.room(pool) > 0]

    def room(self, pool: PoolStats) -> int:
        """Replicas that the pool may get in one decision."""
        used = sum(pool.target for pool in self.pools) * self._rules.gpus_per_worker
        left = int((self._rules.max_gpus - used) / max(self._rules.gpus_per_worker, 1e-9) + 1e-9)
        return max(0, min(pool.max_workers - pool.target, left, self._rules.max_step))

    def least_busy(self, role: str) -> str | None:
        """Who of a role gives it up most easily; None when the role needs its last one."""
        have = [w for w in self.workers() if w.role == role and w.id not in self.unknown]
        if len(have) < 2 and not (have and self.fleet.mixed):
            return None
        return min(have, key=lambda w: (w.load.running_seqs + w.load.waiting_seqs, w.id)).id
