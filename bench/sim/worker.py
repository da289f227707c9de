"""A worker in virtual time: the live scheduler, page pool and lease ledger, with FAKE tokens.

It repeats what ``workers.engine.Engine`` does between two steps, in the same order, and waits on
the clock where the engine computes. Nothing here decides: whatever is decided, live code decides.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Protocol

from bench.sim.clock import Clock
from bench.sim.latency import Latency, calibrated
from bench.sim.quiet import MAX_STEPS, QuietRun, look_ahead
from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.core.ledger import LeaseLedger
from workers.core.load import scheduler_load
from workers.core.output import Load
from workers.core.pace import Pace, pace_of
from workers.core.pages import PagePool
from workers.core.plan import BatchShape, StepPlan
from workers.core.policy import Limits
from workers.core.request import Sequence
from workers.core.scheduler import DoesNotFit, Scheduler

FAKE_SEED, MAX_FAKE = 2654435761, 1 << 31  # an odd number that spreads well
# Learning costs as much as all the rest of a simulated step, and step times here do not change
# by themselves: once learned, a sample now and then is enough.
LEARN_ALL, LEARN_EVERY = 64, 16
PACE_S = 0.5  # between two words of how fast it is: a live heartbeat
IDLE_S = 0.25  # as the engine: how long an idle loop sleeps before it sweeps leases
LLAMA_8B = KVLayout(
    "sim", num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"
)

LIMITS = Limits(max_tokens=512, max_seqs=256)


def fake_token(seed: int, position: int) -> int:
    """The token at ``position`` of the output: known without running anything."""
    return seed * FAKE_SEED % MAX_FAKE + position


def _next_token(seq: Sequence) -> int:
    return fake_token(seq.request.sampling.seed, len(seq.output))


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What one worker of a pool is."""

    latency: Latency
    limits: Limits = LIMITS
    num_pages: int = 4096
    layout: KVLayout = LLAMA_8B
    max_model_len: int = 1 << 20
    prefix_caching: bool = True
    lease_s: float = 30.0
    transfer_timeout_s: float = 5.0
    host_s: float = 0.0  # of every step, beside what ``latency`` says
    num_gpus: int = 1

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that it can hold."""
        return min(self.num_pages * self.layout.page_size, self.max_model_len)


@dataclass(slots=True)
class StepReport:
    """One message per step, as live: what each sequence got, and the load after it."""

    load: Load
    decodes: tuple[Sequence, ...] = ()  # a token for each
    times: list[float] = field(default_factory=list)  # a token at each of these, not one now
    prompts: list[Sequence] = field(default_factory=list)  # computed to the end: a token for each
    finished: dict[str, str] = field(default_factory=dict)  # request id -> why
    handles: dict[str, KVHandle] = field(default_factory=dict)  # handed off
    fallbacks: list[str] = field(default_factory=list)  # ids whose KV is computed again here
    errors: dict[str, str] = field(default_factory=dict)
    pace: Pace | None = None  # every now and then


class Fetcher(Protocol):
    """The links, as a worker sees them."""

    def fetch(
        self, target: "SimWorker", seq: Sequence, skip: int, ended: Callable[[bool], None]
    ) -> None:
        """Bring the pages of ``seq`` after the first ``skip``; then tell whether they landed."""
        ...

    def renew(self, handle: KVHandle) -> None: ...

    def release(self, handle: KVHandle) -> None: ...


class SimWorker:
    """``report`` gets a StepReport after each step and when something ends without one."""

    def __init__(
        self,
        id: str,
        role: str,
        spec: WorkerSpec,
        clock: Clock,
        links: Fetcher,
        report: Callable[["SimWorker", StepReport], None],
        skips: bool = False,
    ) -> None:
        self.id, self.role, self.spec = id, role, spec
        self.pool = PagePool(spec.num_pages, spec.layout.page_size)
        self.scheduler = Scheduler(
            spec.limits,
            self.pool,
            prefix_caching=spec.prefix_caching,
            latency=calibrated(spec.latency),
        )
        self.leases = LeaseLedger(spec.lease_s)
        self.is_dead = False
        self.busy_s = 0.0  # spent in steps
        self.num_steps = 0
        self._num_transfers = 0
        self._clock, self._links, self._tell = clock, links, report
        self._inbox: list[Callable[[], None]] = []
        self._is_stepping = False
        self._is_waking = False  # an idle wake-up is set
        self._renew_at = self._pace_at = 0.0
        self._step_s = 0.0
        self._prompt_tokens, self._output_tokens, self._cached_tokens = 0, 0, 0
        self._next_tokens: dict[str, Iterator[int]] = {}  # of the decodes of the last step
        self._decodes: tuple[Sequence, ...] = ()
        self._skips = skips  # steps in which nothing happens; whoever looks says ``catch_up``
        self._quiet: QuietRun | None = None
        self._note = StepReport(self.load())

    # ------------------------------------------------------------------ in

    def submit(self, seq: Sequence) -> None:
        self._inbox.append(lambda: self._submit(seq))
        self._turn()

    def abort(self, request_id: str) -> None:
        self._inbox.append(lambda: self._abort(request_id))
        self._turn()

    def hand_off(self, request_id: str) -> None:
        """It leaves with its pages after its next token."""
        self._inbox.append(lambda: self._hand_off(request_id))
        self._turn()

    def drop_lease(self, request_id: str) -> None:
        """The receiver has the pages, or wants them no more."""
        self.leases.release(request_id)
        self._turn()

    def die(self) -> None:
        """What it held and computed is gone; nothing it was about to do happens."""
        self.catch_up()
        self.is_dead, self._quiet = True, None

    @property
    def is_clean(self) -> bool:
        """Every page is home and nobody is named in a ledger."""
        self.pool.take_back(self.leases.take_free())
        return (
            not self.scheduler.owned()
            and not self.leases.held()
            and len(self.scheduler) == 0
            and self.pool.num_free == self.pool.num_pages
        )

    # ------------------------------------------------------------------ the loop

    def _turn(self) -> None:
        """Between two steps. Ends with a step under way, or idle."""
        if self._is_stepping or self.is_dead:
            return self._interrupt()
        while True:
            self._read_inbox()
            self._sweep_leases()
            self._renew_leases(self._clock.now)
            plan = self.scheduler.plan(self._clock.now)
            for seq in plan.fetches:
                self._fetch(seq)
            if plan.decodes or plan.prefills:
                return self._start(plan)
            if not plan:
                return self._rest()

    def _start(self, plan: StepPlan) -> None:
        self._is_stepping = True
        for seq, start, _ in plan.prefills:
            if start == seq.num_cached:
                self._cached_tokens += start
        num_quiet = self.scheduler.num_quiet(plan) if self._may_skip(plan) else 1
        if num_quiet > 1:
            return self._look_ahead(plan, min(num_quiet, MAX_STEPS))
        shape = plan.shape
        step_s = self.spec.latency.step_s(shape) + self.spec.host_s
        self._clock.after(step_s, self._end, plan, shape, step_s)

    def _end(self, plan: StepPlan, shape: BatchShape, step_s: float) -> None:
        if self.is_dead:
            return
        self._is_stepping = False
        self._count(shape, step_s)
        note = self._note
        sampled = self._sample(plan, note)
        departures = self.scheduler.commit(plan, sampled)
        self._output_tokens += len(sampled)
        for seq, reason, pages in departures:
            if pages is not None:
                note.handles[seq.id] = self._lease(seq, pages)
            else:
                note.finished[seq.id] = reason or ""
        self._report()
        self._turn()

    def _count(self, shape: BatchShape, step_s: float) -> None:
        self._step_s = step_s
        self.busy_s += step_s
        self.num_steps += 1
        self._prompt_tokens += shape.prefill_tokens
        if self.num_steps <= LEARN_ALL or self.num_steps % LEARN_EVERY == 0:
            self.scheduler.latency.observe(shape, step_s)

    def _sample(self, plan: StepPlan, note: StepReport) -> dict[str, int]:
        """The next fake token of everybody who gets one. Decodes that were in the last step as well
        count on from there: that costs nothing."""
        before = self._next_tokens
        if plan.decodes != self._decodes:
            self._next_tokens = {
                seq.id: before.get(seq.id) or count(_next_token(seq)) for seq in plan.decodes
            }
        note.decodes = self._decodes = plan.decodes
        sampled = dict(zip(self._next_tokens, map(next, self._next_tokens.values()), strict=True))
        for seq, start, length in plan.prefills:
            if start + length == seq.num_tokens:
                sampled[seq.id] = _next_token(seq)
                note.prompts.append(seq)
        return sampled

    # ------------------------------------------------------------------ quiet steps

    def catch_up(self) -> None:
        """Whoever looks at the worker, or chooses it, finds it as it is now."""
        run = self._quiet
        num_steps = run.over(self._clock.now) if run is not None else 0
        if run is None or not num_steps:
            return
        first, run.num_done = run.num_done, run.num_done + num_steps
        note = self._note
        for i in range(first, run.num_done):
            self._count(run.shapes[i], run.seconds[i])
            self._tell_pace(note, run.ends[i])
            self._renew_leases(run.ends[i])
        sampled = {id: list(islice(tokens, num_steps)) for id, tokens in self._next_tokens.items()}
        self.scheduler.commit_quiet(run.plan, sampled, num_steps)
        self._output_tokens += num_steps * len(sampled)
        note.decodes, note.times = run.plan.decodes, run.ends[first : run.num_done]
        self._send()

    def _may_skip(self, plan: StepPlan) -> bool:
        """Streams that just joined are looked at after their first step."""
        return self._skips and plan.decodes == self._decodes and not self.leases.held()

    def _look_ahead(self, plan: StepPlan, num_steps: int) -> None:
        now, spec = self._clock.now, self.spec
        run = self._quiet = look_ahead(plan, num_steps, now, spec.latency, spec.host_s)
        self._clock.at(run.ends[-1], self._end_quiet, run, num_steps)

    def _interrupt(self) -> None:
        """Somebody came: the quiet is over after the step that is under way."""
        run = self._quiet
        if run is None or self.is_dead:
            return
        self.catch_up()
        run.cut()
        self._clock.at(run.ends[-1], self._end_quiet, run, len(run.ends))

    def _end_quiet(self, run: QuietRun, num_steps: int) -> None:
        if self._quiet is not run or len(run.ends) != num_steps or self.is_dead:
            return  # it was cut short
        self.catch_up()
        self._quiet = None
        self._end(run.plan, run.shapes[-1], run.seconds[-1])

    def _rest(self) -> None:
        """Idle. As the engine, look at the leases again in a while if there are any."""
        note = self._note
        if note.errors or note.fallbacks or self.load() != note.load:
            self._report()
        if not self._is_waking and (len(self.scheduler) or self.leases.held()):
            self._is_waking = True
            self._clock.after(IDLE_S, self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        self._turn()

    def _read_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            command()

    def _submit(self, seq: Sequence) -> None:
        try:
            self.scheduler.submit(seq)
        except (DoesNotFit, ValueError) as error:
            self._note.errors[seq.id] = str(error)
            if seq.handle is not None:
                self._links.release(seq.handle)

    def _abort(self, request_id: str) -> None:
        seq = self.scheduler.abort(request_id)
        self.leases.release(request_id)
        if seq is not None and seq.handle is not None:
            self._links.release(seq.handle)

    def _hand_off(self, request_id: str) -> None:
        self.scheduler.hand_off(request_id)

    # ------------------------------------------------------------------ pages

    def _lease(self, seq: Sequence, pages: list[int]) -> KVHandle:
        self.leases.grant(seq.id, pages, seq.num_computed, self._clock.now)
        return KVHandle(seq.id, self.id, self.id, seq.num_computed, len(pages), self.spec.layout)

    def _fetch(self, seq: Sequence) -> None:
        skip, began = seq.num_cached // self.pool.page_size, self._clock.now
        self._links.fetch(self, seq, skip, lambda landed: self._fetched(seq, skip, began, landed))

    def _fetched(self, seq: Sequence, skip: int, began: float, landed: bool) -> None:
        if not self.is_dead:
            self.catch_up()  # steps until now were told of without this transfer
            handle = seq.handle
            if landed and handle is not None and self._num_transfers < LEARN_ALL:
                self._num_transfers += 1
                num_bytes = (handle.num_pages - skip) * handle.layout.page_bytes
                latency = self.scheduler.latency
                latency.observe_transfer(num_bytes, self._clock.now - began, handle.source)
            self._inbox.append(lambda: self._fetch_ended(seq, landed))
            self._turn()

    def _fetch_ended(self, seq: Sequence, landed: bool) -> None:
        handle = seq.handle
        if handle is not None:
            self._links.release(handle)
        if self.scheduler.fetch_ended(seq, landed) and not landed:
            self._note.fallbacks.append(seq.id)

    def _renew_leases(self, now: float) -> None:
        if now < self._renew_at:
            return
        self._renew_at = now + self.spec.lease_s / 4
        for seq in self.scheduler.waiting():
            if seq.handle is not None:
                self._links.renew(seq.handle)

    def _sweep_leases(self) -> None:
        self.leases.expire(self._clock.now)
        free = self.leases.take_free()
        if free:
            self.pool.take_back(free)

    # ------------------------------------------------------------------ telling

    def _report(self) -> None:
        self._tell_pace(self._note, self._clock.now)
        self._send()

    def _send(self) -> None:
        note = self._note
        note.load = self.load()
        self._note = StepReport(note.load)
        self._tell(self, note)

    def _tell_pace(self, note: StepReport, now: float) -> None:
        if now >= self._pace_at:
            self._pace_at = now + PACE_S
            note.pace = self.pace()

    def pace(self) -> Pace:
        return pace_of(self.scheduler.latency, self.spec.limits, self.spec.layout.token_bytes)

    def load(self) -> Load:
        self.catch_up()
        return scheduler_load(
            self.scheduler,
            sum(self.leases.held().values()),
            step=self.num_steps,
            step_s=self._step_s,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=self._cached_tokens,
        )
