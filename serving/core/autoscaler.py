"""Clocks 3 and 4: which role each worker has, and how many workers there are.

A decision is a function of what was observed, and of a little memory: what the last minutes asked
for, and when something was changed. Its order of means is their price: the step budgets take what
will pass by itself, a flip takes a worker where it is needed more, a replica costs a GPU.

    up      the predicted pressure is above 1, or promises are broken and a replica would help
    down    one worker less still kept the promises of the last minutes, with a margin
    hold    whatever is not known: silence, a stuck counter and a late start are not zero demand

It knows counts, seconds and promises. It refuses to know Ray, clocks and who carries it out.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from operator import attrgetter

from serving.core.capacity import Fleet, Pressure, StepCosts, Work, pressure, work_of
from serving.core.demand import DemandStats, Trend, Window, chance_of, is_busier
from serving.core.scaling import (
    ABSORB,
    ADD,
    DECODE,
    FLIP,
    HOLD,
    PREFILL,
    REMOVE,
    PoolStats,
    ScaleDecision,
    ScaleRules,
    View,
)
from workers.core.output import Load

FLIPS = ((DECODE, PREFILL), (PREFILL, DECODE))
WORST = attrgetter("worst")

UP_AT = 1.0  # pressure
PERSISTS = 6  # periods in a row above are no chance, however little above
URGENT_AT = 1.5  # not confirmed by a second look
HELPS_AT = 0.5  # below this pressure, a broken promise without a queue is noise
BURST_AT = 0.7  # when more comes than chance explains: nobody knows yet where it ends
DOWN_AT = (0.5, 0.9)  # with one worker less: by how much the load may differ by chance
ROOM_SIGMAS = 1.5  # of that; what is looked back on is the worst of its time already
GAIN = 0.9  # a flip brings the pressure down to at most this part
MEASURED_GAIN = 0.25  # what one period's work counts beside those before
WRONG_FOR_S = 1800.0  # how slowly a prediction that was too good is forgiven
MAX_WRONG = 3.0
EVENT_WINDOW_S = 600.0
STUCK_PERIODS = 3.0  # prompts computed so lately came from somewhere, whatever is counted
MAX_HOLD = 8.0  # times ``stable_s``
FORGIVEN = 4.0  # times the hold without a regret, and it is halved
FIRST_START_S = 30.0  # until one was seen


@dataclass(slots=True)
class _Start:
    """Replicas of a pool that are on their way."""

    since: float
    num_ready: int


@dataclass(slots=True)
class _Episode:
    """A queue that was left to the step budgets."""

    since: float
    until: float


@dataclass(frozen=True, slots=True)
class _Breach:
    """More than there is room for, or not what was promised."""

    work: Work
    at_base: Pressure  # without the backlog
    now: Pressure
    limit: float  # what the pressure is to come down to
    reason: str


class Autoscaler:
    """``decide`` once a period. Not thread-safe."""

    def __init__(self, rules: ScaleRules) -> None:
        self.rules = rules
        self.start_s = FIRST_START_S  # how long a replica takes, as seen lately
        self._past: deque[tuple[float, Work, int]] = deque()  # with the arrivals of each period
        self._costs: StepCosts | None = None
        self._num_breaches = 0  # periods in a row
        self._num_above = 0  # the same, without an allowance for chance
        self._episode: _Episode | None = None
        self._trend = Trend()
        self._hold_s = rules.stable_s  # how long nobody may be needed before somebody goes
        self._measured = Work()
        self._wrong = 1.0  # how far predictions were too good
        self._counters: dict[str, Load] = {}
        self._moved_at: dict[str, float] = {}  # when a worker's step counter last moved
        self._starts: dict[str, _Start] = {}
        self._events: deque[float] = deque()  # of the last ten minutes
        self._last: dict[str, float] = {}  # when each kind of event happened last
        self._last_at: float | None = None
        self._prompts_at = -inf  # when workers were last seen to compute some
        self._cached = 0.0  # part of the prompt tokens

    def decide(
        self,
        pools: Sequence[PoolStats],
        demand: DemandStats | None,
        costs: StepCosts | None,
        now: float,
    ) -> ScaleDecision:
        """``demand`` is None when nobody could say; ``costs`` until a worker has told its model."""
        self._costs = costs or self._costs
        self._watch_starts(pools, now)
        view = View(pools, self.rules, self._unknown(pools, now), self._counted(pools, now))
        measured = self._measure(view, now)
        decision = self._decide(view, demand, measured, now)
        if decision.is_event:
            self._note(decision, now)
        return decision

    # ------------------------------------------------------------------ deciding

    def _decide(
        self, view: View, demand: DemandStats | None, measured: Work, now: float
    ) -> ScaleDecision:
        if demand is None:
            return ScaleDecision(HOLD, "nobody says what is asked for: that is not zero demand")
        if not view.fleet.num:
            return self._from_nothing(view, demand)
        computing = now - self._prompts_at < STUCK_PERIODS * self.rules.period_s
        stuck = not demand.recent.num_arrived and computing and not view.num_queued
        if not stuck:
            self._trend.note(demand.recent, now, self.start_s)
        if self._costs is None:
            return ScaleDecision(HOLD, "no worker has told its step times yet")
        steady = self._trend.steady(demand.steady)
        base = self._demanded(steady, demand, self._costs).at_least(measured)
        hard = self._with_backlog(base, view, demand)
        at_base, at_hard = (pressure(view.fleet, w, self._costs) for w in (base, hard))
        broken = demand.broken
        settled = not any(pool.num_starting for pool in view.pools) and all(
            self._cooling(kind, self.rules.settle_s, now) <= 0 for kind in (ADD, FLIP)
        )
        helps = view.num_queued or at_hard.worst > HELPS_AT
        if broken and settled and helps and at_hard.worst <= UP_AT:
            hard = self._corrected(hard, at_hard)
            at_hard = pressure(view.fleet, hard, self._costs)
        self._remember(hard, demand.recent.num_arrived, now)
        limit = UP_AT if broken else UP_AT + steady.chance
        if is_burst := is_busier(demand.recent, steady):
            limit = max(BURST_AT, self._margin())
        self._num_above = self._num_above + 1 if at_hard.worst > UP_AT else 0
        is_breach = at_hard.worst > limit or self._num_above >= PERSISTS
        self._num_breaches = self._num_breaches + 1 if is_breach else 0
        if is_breach:
            reason = f"{_need(at_hard)} on {view.fleet}" + (f", and {broken}" if broken else "")
            limit = min(limit, UP_AT)
            return self._up(view, _Breach(hard, at_base, at_hard, limit, reason), now)
        if broken:
            return ScaleDecision(
                HOLD,
                f"{broken}, but there is no queue and little load: more would not help",
                now=at_hard,
            )
        if stuck:
            return ScaleDecision(
                HOLD,
                "the count of arrivals stands still while workers compute prompts",
                now=at_hard,
            )
        if is_burst:
            more = f"{_need(at_hard)} on {view.fleet}; more came just now than chance explains"
            return ScaleDecision(HOLD, more, now=at_hard)
        return self._down(view, at_hard, now)

    def _from_nothing(self, view: View, demand: DemandStats) -> ScaleDecision:
        if not demand.num_waiting and not demand.recent.num_arrived:
            return ScaleDecision(HOLD, "nothing is asked for, and there is no worker")
        pool = next(iter(view.growable()), None)
        if pool is None:
            return ScaleDecision(HOLD, "requests wait, and every pool is at its limit or starting")
        num = self._first_workers(view, pool, demand)
        return ScaleDecision(
            ADD,
            f"{demand.num_waiting} requests wait and there is no worker: {num} to {pool.name}",
            pool.name,
            pool.target + num,
        )

    def _first_workers(self, view: View, pool: PoolStats, demand: DemandStats) -> int:
        """As many as the arrivals so far need, when the costs are known; one otherwise."""
        num = 1
        if self._costs is not None:
            work = self._demanded(demand.steady, demand, self._costs)
            most = view.room(pool)
            while (
                num < most and pressure(Fleet().plus(pool.role, num), work, self._costs).worst > 1
            ):
                num += 1
        return num

    def _up(self, view: View, breach: _Breach, now: float) -> ScaleDecision:
        need, limit = breach.reason, breach.limit
        hold = ScaleDecision(HOLD, need, now=breach.now)
        urgent = breach.now.worst > URGENT_AT or limit < UP_AT
        if self._num_breaches < 2 and not urgent:
            return replace(hold, reason=f"{need}: seen once, looking again")
        if breach.at_base.worst <= limit and self._absorbs(breach.at_base, now):
            return ScaleDecision(
                ABSORB,
                f"{need}: the step budgets take it, the queue is gone before a replica could start "
                f"({self.start_s:.0f} s)",
                now=breach.now,
            )
        if (wait_s := self._cooling(REMOVE, self.rules.up_cool_s, now)) > 0:
            return replace(hold, reason=f"{need}: {wait_s:.0f} s after a removal")
        if self._num_events(now) >= self.rules.max_events:
            return replace(hold, reason=f"{need}: too many changes in ten minutes")
        flip = self._flip(view, breach, now)
        if flip is not None and flip.after.worst <= limit:
            return replace(flip, reason=f"{need}: {flip.reason}")
        add = self._add(view, breach)
        if add is not None:
            return replace(add, reason=f"{need}: {add.reason}")
        if flip is not None:
            return replace(flip, reason=f"{need}: no GPU is left, {flip.reason}")
        return replace(hold, reason=f"{need}: at the limit of what may be used")

    def _flip(self, view: View, breach: _Breach, now: float) -> ScaleDecision | None:
        """The best exchange of one worker between prefill and decode; None when none pays."""
        assert self._costs is not None
        work, before = breach.work, breach.now
        if not self.rules.flips or self._cooling(FLIP, self.rules.flip_cool_s, now) > 0:
            return None
        best: ScaleDecision | None = None
        for source, role in FLIPS:
            worker = view.least_busy(source)
            if worker is None or self._cooling(f"{role}>{source}", self.rules.down_cool_s, now) > 0:
                continue
            after = pressure(view.fleet.flipped(source, role), work, self._costs)
            if after.worst > GAIN * before.worst or (best and after.worst >= best.after.worst):
                continue
            reason = f"{worker} goes from {source} to {role}, {_then(after)}; no GPU is needed"
            best = ScaleDecision(
                FLIP, reason, worker=worker, role=role, now=before, after=after, pool=source
            )
        return best

    def _add(self, view: View, breach: _Breach) -> ScaleDecision | None:
        """The fewest replicas that bring the pressure to the limit, else those that help most."""
        assert self._costs is not None
        before = breach.now
        best: tuple[tuple[bool, float, float], ScaleDecision] | None = None
        for pool in view.growable():
            for num in range(1, view.room(pool) + 1):
                after = pressure(view.fleet.plus(pool.role, num), breach.work, self._costs)
                holds = after.worst <= breach.limit
                rank = (not holds, float(num) if holds else after.worst, after.worst)
                if best is None or rank < best[0]:
                    reason = f"{num} more in {pool.name}, {_then(after)}"
                    target = pool.target + num
                    best = (
                        rank,
                        ScaleDecision(ADD, reason, pool.name, target, now=before, after=after),
                    )
        return None if best is None or best[1].after.worst >= before.worst else best[1]

    def _down(self, view: View, at_now: Pressure, now: float) -> ScaleDecision:
        calm = ScaleDecision(HOLD, f"{_need(at_now)} on {view.fleet}", now=at_now)
        if view.unknown:
            return replace(calm, reason=f"{calm.reason}; {view.unknown[0]} is not heard from")
        if view.num_queued or now - self._past[0][0] < self._hold_s - self.rules.period_s:
            return calm
        changed_s = max(self._cooling(kind, self.rules.down_cool_s, now) for kind in (ADD, FLIP))
        if changed_s > 0 or self._cooling(REMOVE, 2 * self.rules.period_s, now) > 0:
            return calm
        works, margin = self._hardest(), max(DOWN_AT[0], min(DOWN_AT[1], self._margin()))
        for pool in sorted(view.pools, key=lambda pool: -pool.target):
            num, after = self._spare(view, pool, works, margin)
            if num:
                return ScaleDecision(
                    REMOVE,
                    f"{num} fewer in {pool.name} would still have kept the promises of the last "
                    f"{self._hold_s:.0f} s ({_then(after)})",
                    pool.name,
                    pool.target - num,
                    now=at_now,
                    after=after,
                )
        return calm

    def _spare(
        self, view: View, pool: PoolStats, works: Sequence[Work], margin: float
    ) -> tuple[int, Pressure]:
        """How many of a pool are not needed, whichever Serve takes, after one flip at most."""
        assert self._costs is not None
        roles = Counter(worker.role for worker in pool.workers)
        starting, late = pool.num_starting, pool.num_starting - view.counted[pool.name]
        most = min(self.rules.max_step, pool.target - pool.min_workers)
        fleet, num, at = view.fleet, min(late, most), self._best(view.fleet, works)
        while num < most:  # those that start go first
            gone = [pool.role] if num < starting else [role for role in roles if roles[role]]
            options = [(self._best(fleet.plus(role, -1), works), role) for role in gone]
            if not options:
                break
            after, role = max(options, key=lambda option: option[0].worst)
            if after.worst > margin:
                break
            fleet, at, num = fleet.plus(role, -1), after, num + 1
            if num > starting:
                roles[role] -= 1
        return num, at

    def _best(self, fleet: Fleet, works: Sequence[Work]) -> Pressure:
        assert self._costs is not None
        fleets = [fleet]
        if self.rules.flips:
            fleets += [fleet.flipped(a, b) for a, b in FLIPS if getattr(fleet, a) > 1]
        costs = self._costs
        hardest = [max((pressure(f, w, costs) for w in works), key=WORST) for f in fleets]
        return min(hardest, key=WORST)

    # ------------------------------------------------------------------ what is asked for

    def _demanded(self, steady: Window, demand: DemandStats, costs: StepCosts) -> Work:
        """By the steady rate, or by the recent one when chance does not explain it."""

        def work(window: Window) -> Work:
            slos = demand.ttft_slo_s, demand.itl_slo_s
            return work_of(window, costs, demand.mean_output, self._cached, *slos)

        if is_busier(demand.recent, steady):
            return work(steady).at_least(work(demand.recent))
        return work(steady).times(self._trend.factor(steady))

    def _with_backlog(self, work: Work, view: View, demand: DemandStats) -> Work:
        """What waits beyond what can be served in half a promise is to be gone by the time that a
        replica would be there."""
        assert self._costs is not None
        queued_s = max(
            self._costs.prompt_token_s * view.queued_tokens, work.prompt_s * demand.num_waiting
        )
        fleet = view.fleet
        servers = fleet.prefill + fleet.mixed or fleet.num
        late_s = queued_s - servers * work.ttft_slo_s / 2
        if late_s <= 0:
            return work
        return replace(work, prefill=work.prefill + late_s / max(self.start_s, 10.0))

    def _corrected(self, work: Work, predicted: Pressure) -> Work:
        """Promises are broken where none should be: what is measured counts."""
        factor = min(MAX_WRONG, 1.1 * UP_AT / max(predicted.worst, 1e-6))
        self._wrong = max(self._wrong, factor)
        return work.times(factor)

    def _measure(self, view: View, now: float) -> Work:
        """What the workers computed since the last look: streams that run are demand as well."""
        costs, since = self._costs, self._last_at
        loads = {worker.id: worker.load for worker in view.workers()}
        before, self._counters, self._last_at = self._counters, loads, now
        cached = sum(load.cached_tokens for load in loads.values())
        prompts = sum(load.prompt_tokens for load in loads.values())
        self._cached = min(0.9, cached / max(1, cached + prompts))
        if costs is None or since is None or now <= since:
            return Work()
        span_s = now - since
        pairs = [(before[name], load) for name, load in loads.items() if name in before]
        tokens = sum(max(0, new.output_tokens - old.output_tokens) for old, new in pairs) / span_s
        prompts_s = (
            sum(max(0, new.prompt_tokens - old.prompt_tokens) for old, new in pairs) / span_s
        )
        if prompts_s:
            self._prompts_at = now
        streams = sum(load.decode_seqs for load in loads.values())
        held = sum(load.context_tokens for load in loads.values())
        context = held / streams if streams else 0.0
        decode = tokens * (costs.decode_s + costs.context_s * context) if streams else 0.0
        old, gain = self._measured, MEASURED_GAIN
        self._measured = Work(
            prefill=old.prefill + gain * (costs.prompt_token_s * prompts_s - old.prefill),
            decode=old.decode + gain * (decode - old.decode),
            tokens=old.tokens + gain * (tokens - old.tokens),
            context=context,
            held=float(held),
            spread=0.0,
            ttft_slo_s=1e9,
            itl_slo_s=1e9,
        )
        return self._measured

    def _remember(self, work: Work, num_arrived: int, now: float) -> None:
        self._wrong = 1 + (self._wrong - 1) * exp(-self.rules.period_s / WRONG_FOR_S)
        self._past.append((now, work, num_arrived))
        if now - self._last.get(REMOVE, now) > FORGIVEN * self._hold_s:
            self._hold_s = max(self.rules.stable_s, self._hold_s / 2)
            self._last.pop(REMOVE, None)
        while self._past[0][0] < now - self._hold_s:
            self._past.popleft()

    def _hardest(self) -> tuple[Work, ...]:
        """Of the last minutes: the moments that asked most, in each respect."""
        works = [work for _, work, _ in self._past]
        respects: tuple[Callable[[Work], float], ...] = (
            lambda work: work.prefill + work.decode,
            lambda work: work.prefill,
            lambda work: work.decode,
            lambda work: work.held,
        )
        return tuple(max(works, key=respect).times(self._wrong) for respect in respects)

    def _margin(self) -> float:
        """The pressure that leaves room for what may come by chance."""
        counts = [count for _, _, count in self._past]
        spread = max(work.spread for _, work, _ in self._past)
        return UP_AT / (1.0 + ROOM_SIGMAS * chance_of(counts, spread))

    def _absorbs(self, base: Pressure, now: float) -> bool:
        """Whether a queue passes before a replica could help. One that comes back does not."""
        if base.worst > GAIN:
            return False
        episode = self._episode
        if episode is None or now - episode.until > 3 * self.rules.period_s:
            if episode is not None and now - episode.until < 2 * self.rules.stable_s:
                return False
            episode = self._episode = _Episode(now, now)
        episode.until = now
        return now - episode.since < self.start_s

    # ------------------------------------------------------------------ who is there

    def _watch_starts(self, pools: Sequence[PoolStats], now: float) -> None:
        for pool in pools:
            start, ready = self._starts.get(pool.name), len(pool.workers)
            if not pool.num_starting:
                if start is not None and ready > start.num_ready:
                    self.start_s += 0.5 * (now - start.since - self.start_s)
                self._starts.pop(pool.name, None)
            elif start is None or ready > start.num_ready:
                since = now if start is None else start.since
                self._starts[pool.name] = _Start(since, ready)
            else:
                self.start_s = max(self.start_s, now - start.since)

    def _counted(self, pools: Sequence[PoolStats], now: float) -> dict[str, int]:
        """Starting replicas that are counted on, by pool. One that is late is not."""
        counted = {}
        for pool in pools:
            start = self._starts.get(pool.name)
            late = start is not None and now - start.since > self.rules.start_patience_s
            counted[pool.name] = 0 if late else pool.num_starting
        return counted

    def _unknown(self, pools: Sequence[PoolStats], now: float) -> list[str]:
        """Workers that are silent, or whose steps stand still though they have work."""
        unknown = []
        for worker in (worker for pool in pools for worker in pool.workers):
            load, old = worker.load, self._counters.get(worker.id)
            has_work = load.running_seqs or load.waiting_seqs
            if old is None or load.step != old.step or not has_work:
                self._moved_at[worker.id] = now
            stands_s = now - self._moved_at[worker.id]
            if max(worker.silent_s, stands_s) > self.rules.stale_s:
                unknown.append(worker.id)
        return unknown

    # ------------------------------------------------------------------ what was done

    def _note(self, decision: ScaleDecision, now: float) -> None:
        self._events.append(now)
        if decision.kind in (ADD, FLIP) and self._cooling(REMOVE, self._hold_s, now) > 0:
            # Let go too soon: loads that come and go are worth waiting for.
            self._hold_s = min(2 * self._hold_s, MAX_HOLD * self.rules.stable_s)
        self._last[decision.kind] = now
        if decision.kind == FLIP:
            self._last[f"{decision.pool}>{decision.role}"] = now
        if decision.kind == ADD:
            self._starts.pop(decision.pool, None)  # patience begins anew
        self._num_breaches = self._num_above = 0

    def _cooling(self, kind: str, cool_s: float, now: float) -> float:
        """Seconds until the last event of this kind is so long ago."""
        return cool_s - (now - self._last[kind]) if kind in self._last else 0.0

    def _num_events(self, now: float) -> int:
        while self._events and self._events[0] < now - EVENT_WINDOW_S:
            self._events.popleft()
        return len(self._events)


def _need(p: Pressure) -> str:
    return f"{p.worst:.0%} of what the {p.side} side can take"


def _then(p: Pressure) -> str:
    return f"then {p.worst:.0%}"
