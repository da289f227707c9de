"""The step loop of one worker, on its own thread: plan, run, commit, emit.

The engine knows nothing about text, sockets or Ray. Everything that reaches it from another
thread goes through its inbox and takes effect between two steps, so the scheduler needs no lock.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.leases import Leases
from kvtransfer.transport import Landing, TransferError, Transport
from workers.clocked import Clocked
from workers.core.load import scheduler_load
from workers.core.output import KVLedger, Load, Output, Report, Token
from workers.core.pace import Pace, pace_of
from workers.core.plan import Chunk, Fetched, StepPlan
from workers.core.request import Phase, Sequence
from workers.core.scheduler import Departure, DoesNotFit, Scheduler

logger = logging.getLogger(__name__)

IDLE_S = 0.25  # how long an idle loop sleeps before it sweeps leases
MAX_EARLY = 16  # fetches at a time of pages that are still being computed
MAX_FAILED_STEPS = 3  # in a row; then the worker says it is not healthy


class Executor(Protocol):
    """Computes chunks: the model runner, or the FAKE model of the tests."""

    vocab_size: int

    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]:
        """Compute the chunks; the next token of each sequence whose chunk samples."""
        ...

    def forget(self, request_id: str) -> None:
        """The sequence has left this worker: drop what is kept for it."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """How other workers address this one's pages."""

    address: str  # "host:port" of the control server
    incarnation: str
    layout: KVLayout


class Engine:
    """Runs sequences on one executor. ``emit`` is called on the engine's thread, once per step
    that has something to tell, and when the load changes without a step."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        leases: Leases,
        transport: Transport | None,
        source: Source,
        *,
        emit: Callable[[Report], None],
        clock: Callable[[], float] = time.monotonic,
        transfer_timeout_s: float = 5.0,
    ) -> None:
        self._executor, self._scheduler, self._leases = executor, scheduler, leases
        self._transport, self._source, self._emit, self._clock = transport, source, emit, clock
        self._transfer_timeout_s = transfer_timeout_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clocks: dict[str, Clocked] = {}
        self._outputs: list[Output] = []
        self._ahead: set[str] = set()  # early ones that go on and were not submitted yet
        self._fetchers = _threads(4, "kv-fetch")
        self._early = _threads(MAX_EARLY, "kv-early")
        self._num_early = 0
        self._notes = _threads(1, "kv-notes")  # renew and release
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._is_over = False
        self._ending = threading.Lock()
        self._renew_at = 0.0
        leases.on_free = self._wake
        self._steps, self._step_s, self._failed_steps = 0, 0.0, 0
        self._prompt_tokens, self._output_tokens, self._cached_tokens = 0, 0, 0
        self._chunk_tokens = 0
        self._load = Load(num_pages=scheduler.pool.num_pages, free_pages=scheduler.pool.num_free)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after the running step. What has not finished ends with an error."""
        self._inbox.put(self._stop)
        self._thread.join(timeout_s)
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._early.shutdown(wait=False, cancel_futures=True)
        self._notes.shutdown(wait=False, cancel_futures=True)
        if self._transport is not None:
            self._transport.close()

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence; whatever becomes of it is an Output. Of an early one nothing is told:
        it takes its pages now, or is forgotten, and is submitted again with its token. When its
        token comes with its pages it goes on at once, and tells what follows before that."""
        now = self._clock()
        self._tell(lambda: self._submit(seq, now))

    def abort(self, request_id: str) -> None:
        """End a request in whatever phase, and let go of a lease under its id. Idempotent."""
        self._tell(lambda: self._abort(request_id))

    def hand_off(self, request_id: str) -> None:
        """Let a running request leave with its pages after its next token. Idempotent."""
        self._tell(lambda: self._hand_off(request_id))

    def load(self) -> Load:
        """As of the last step."""
        return self._load

    def pace(self) -> Pace:
        """How fast this worker is now."""
        scheduler = self._scheduler
        return pace_of(scheduler.latency, scheduler.limits, self._source.layout.token_bytes)

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and self._failed_steps < MAX_FAILED_STEPS

    def ledger(self, timeout_s: float = 5.0) -> KVLedger:
        """Who holds each page, between two steps."""
        answer: queue.SimpleQueue[KVLedger] = queue.SimpleQueue()
        self._tell(lambda: answer.put(self._take_stock()))
        return answer.get(timeout=timeout_s)

    def _tell(self, command: Callable[[], None]) -> None:
        self._inbox.put(command)
        if self._is_over:
            self._answer_the_rest("this worker has stopped")

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        end = "this worker has stopped"
        try:
            while not self._stopping:
                self._turn()
        except Exception:  # a fault of ours: nothing of what runs here can be trusted any more
            logger.exception("the engine loop failed")
            end = "this worker has failed"
        self._is_over = True
        self._answer_the_rest(end)

    def _turn(self) -> None:
        began = self._clock()
        self._read_inbox()
        self._sweep_leases()
        self._renew_leases()
        plan = self._scheduler.plan(began)
        for seq in plan.preempted:
            self._leases.revoke(seq.id)
        self._note_planned(plan)
        for seq in plan.fetches:
            self._fetchers.submit(self._fetch, seq)
        shape, stepped = plan.shape, bool(plan.decodes or plan.prefills)
        succeeded = stepped and self._step(plan)
        self._report(stepped)
        if succeeded:  # the whole turn: that is what lies between two tokens
            self._scheduler.latency.observe(shape, self._clock() - began)
        if not plan:
            self._wait()

    def _answer_the_rest(self, reason: str) -> None:
        """After the loop: whatever runs, or still arrives, ends. Leases elsewhere expire."""
        with self._ending:
            self._read_inbox()
            for request_id in self._clocks:
                self._outputs.append(Output(request_id, finish_reason="error", error=reason))
            self._clocks.clear()
            self._report(stepped=False)

    def _step(self, plan: StepPlan) -> bool:
        """Whether it succeeded."""
        start, chunks = self._clock(), plan.chunks
        try:
            tokens = self._executor.run(chunks)
        except Exception as error:  # whatever it is, it ends these requests and not the worker
            logger.exception("step %d failed; its requests end with an error", self._steps)
            self._failed_steps += 1
            for chunk in chunks:
                self._fail(chunk.seq, f"the model step failed: {type(error).__name__}")
            return False
        self._failed_steps = 0
        self._drop_bad_tokens(chunks, tokens)
        departures = self._scheduler.commit(plan, {id: token.id for id, token in tokens.items()})
        self._promise(plan)
        now = self._clock()
        self._steps, self._step_s = self._steps + 1, now - start
        if plan.prefills:
            self._chunk_tokens = sum(chunk.length for chunk in plan.prefills)
            self._prompt_tokens += self._chunk_tokens
        self._emit_tokens(
            chunks, tokens, {departure.seq.id: departure for departure in departures}, now
        )
        return True

    def _promise(self, plan: StepPlan) -> None:
        """Let receivers fetch what is finished of prompts that will be handed off."""
        page_size = self._scheduler.pool.page_size
        for seq, start, _ in plan.prefills:
            if seq.phase is not Phase.PREFILL or not seq.hand_off:
                continue
            if start == seq.num_cached and seq.max_output - len(seq.output) > 1:
                promise = self._handle(seq, seq.num_tokens)
                self._outputs.append(Output(seq.id, promise=promise))
            self._leases.promise(seq.id, seq.pages, seq.num_computed // page_size)

    def _drop_bad_tokens(self, chunks: tuple[Chunk, ...], tokens: dict[str, Token]) -> None:
        """An id outside the vocabulary would take the whole batch down at the next step."""
        for chunk in chunks:
            token = tokens.get(chunk.seq.id)
            if token is not None and not 0 <= token.id < self._executor.vocab_size:
                self._fail(chunk.seq, f"sampled token id {token.id} is outside the vocabulary")
                del tokens[chunk.seq.id]

    def _emit_tokens(
        self,
        chunks: tuple[Chunk, ...],
        tokens: dict[str, Token],
        departures: dict[str, Departure],
        now: float,
    ) -> None:
        """An output for each sequence that got a token."""
        for chunk in chunks:
            token = tokens.get(chunk.seq.id)
            if token is not None:
                departure = departures.get(chunk.seq.id)
                self._outputs.append(self._output(chunk.seq, token, departure, now))
                self._output_tokens += 1

    def _output(
        self, seq: Sequence, token: Token, departure: Departure | None, now: float
    ) -> Output:
        clocked = self._clocks[seq.id]
        is_first = not clocked.first_token
        if departure is None and not is_first:
            return Output(seq.id, token)
        clocked.first_token = clocked.first_token or now
        fallback, clocked.fallback = clocked.fallback, None
        handle = None
        if departure is not None and departure.handed_off is not None:
            handle = self._lease(seq, departure.handed_off)
        if departure is not None:
            self._forget(seq.id)
        return Output(
            seq.id,
            token,
            departure.finish_reason if departure else None,
            handle,
            fallback=fallback,
            timing=clocked.timing(seq, now),
        )

    def _lease(self, seq: Sequence, pages: list[int]) -> KVHandle:
        self._leases.grant(seq.id, pages, seq.num_computed, seq.output[-1])
        return self._handle(seq, seq.num_computed)

    def _handle(self, seq: Sequence, num_tokens: int) -> KVHandle:
        source = self._source
        num_pages = self._scheduler.pool.pages_for(num_tokens)
        return KVHandle(
            seq.id, source.address, source.incarnation, num_tokens, num_pages, source.layout
        )

    def _note_planned(self, plan: StepPlan) -> None:
        now = self._clock()
        for seq in (*plan.fetches, *(chunk.seq for chunk in plan.prefills)):
            clocked = self._clocks[seq.id]
            if not clocked.planned:
                clocked.planned = now
                self._cached_tokens += seq.num_cached

    # ------------------------------------------------------------------ the inbox

    def _read_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _wait(self) -> None:
        try:
            self._inbox.get(timeout=IDLE_S)()
        except queue.Empty:
            return

    def _stop(self) -> None:
        self._stopping = True

    def _wake(self) -> None:
        self._inbox.put(lambda: None)

    def _submit(self, seq: Sequence, now: float) -> None:
        if seq.is_early:
            self._reserve(seq, now)
            return
        if self._catch_up(seq):
            return
        if seq.handle is not None and seq.output:
            is_here = self._confirm(seq.id, seq.output[-1], seq.hand_off, now)
            if is_here:
                return
        try:
            self._scheduler.submit(seq)
        except (DoesNotFit, ValueError) as error:
            self._outputs.append(Output(seq.id, finish_reason="error", error=str(error)))
            self._release_handle(seq)
            return
        self._clocks[seq.id] = Clocked(now)

    def _reserve(self, seq: Sequence, now: float) -> None:
        has_thread = self._transport is not None and self._num_early < MAX_EARLY
        if seq.handle is not None and has_thread and self._scheduler.reserve(seq):
            self._clocks[seq.id] = Clocked(now, planned=now)
            self._num_early += 1
            self._early.submit(self._fetch, seq)

    def _catch_up(self, seq: Sequence) -> bool:
        """Whether a sequence of this id went on, or has ended, ahead of its gateway."""
        if seq.id not in self._ahead:
            return False
        self._ahead.remove(seq.id)
        if seq.hand_off:
            self._hand_off(seq.id)
        return True

    def _confirm(self, request_id: str, token: int, hand_off: bool, now: float) -> bool:
        """Whether an early sequence of this id is here, and goes on with its newest token."""
        early = self._scheduler.confirm(request_id, token, hand_off)
        if early is not None:
            clocked = self._clocks[request_id]
            clocked.submitted = clocked.planned = now
            clocked.fetched = self._clock() if early.phase is Phase.DECODE else 0.0
            self._cached_tokens += early.num_cached
        return early is not None

    def _abort(self, request_id: str) -> None:
        seq = self._scheduler.abort(request_id)
        self._ahead.discard(request_id)
        self._leases.release(request_id)
        if seq is not None:
            self._outputs.append(Output(request_id, finish_reason="abort"))
            self._forget(request_id)
            self._release_handle(seq)

    def _hand_off(self, request_id: str) -> None:
        self._scheduler.hand_off(request_id)

    def _fail(self, seq: Sequence, reason: str) -> None:
        if self._scheduler.abort(seq.id) is not None:
            self._outputs.append(Output(seq.id, finish_reason="error", error=reason))
            self._forget(seq.id)

    def _forget(self, request_id: str) -> None:
        self._leases.revoke(request_id)
        self._clocks.pop(request_id, None)
        self._executor.forget(request_id)

    # ------------------------------------------------------------------ transfers

    def _fetch(self, seq: Sequence) -> None:
        """On a fetcher's thread: bring the pages, then tell the loop."""
        assert seq.handle is not None, "only a sequence with a handle is fetched"
        handle, is_early, start = seq.handle, seq.is_early, self._clock()
        skip = seq.num_cached // self._scheduler.pool.page_size  # already here
        pages = seq.pages[skip : handle.num_pages]
        failure: str | None = None
        landing: Landing | None = None
        try:
            landing = self._transfer(handle, pages, skip, is_early)
        except Exception as error:  # any failure becomes a recompute, never a lost request
            failure = f"{type(error).__name__}: {error}"
        token = None if landing is None else landing.token
        took_s = self._clock() - start if landing is None else landing.took_s
        num_bytes = len(pages) * handle.layout.page_bytes
        fetched = Fetched(is_early, failure, token, num_bytes, took_s)
        self._inbox.put(lambda: self._fetch_ended(seq, fetched))

    def _transfer(
        self, handle: KVHandle, pages: list[int], skip: int, is_early: bool
    ) -> Landing | None:
        if self._transport is None:
            raise TransferError("this worker has no transport")
        if is_early:
            return self._transport.fetch_early(handle, pages, self._transfer_timeout_s, skip)
        self._transport.fetch(handle, pages, self._transfer_timeout_s, skip)
        return None

    def _fetch_ended(self, seq: Sequence, fetched: Fetched) -> None:
        self._num_early -= fetched.was_early
        if seq.is_early:
            self._early_ended(seq, fetched)
            return
        failure, handle = fetched.failure, seq.handle
        if failure is not None:
            logger.warning("%s: KV is recomputed here, the transfer failed: %s", seq.id, failure)
            self._release_handle(seq)
        elif handle is not None and not fetched.was_early:  # that one waits for the prefill, too
            latency = self._scheduler.latency
            latency.observe_transfer(fetched.num_bytes, fetched.took_s, handle.source)
        if self._scheduler.fetch_ended(seq, landed=failure is None):
            clocked = self._clocks[seq.id]
            clocked.fallback = failure
            clocked.fetched = 0.0 if failure else self._clock()

    def _early_ended(self, seq: Sequence, fetched: Fetched) -> None:
        if fetched.failure is not None:
            logger.info("%s: its pages are not fetched early: %s", seq.id, fetched.failure)
        if not self._scheduler.fetch_ended(seq, landed=fetched.failure is None):
            self._clocks.pop(seq.id, None)
        elif fetched.token is not None:  # it need not wait for the gateway to bring it
            self._ahead.add(seq.id)
            self._confirm(seq.id, fetched.token, False, self._clock() - fetched.took_s)

    def _release_handle(self, seq: Sequence) -> None:
        """Tell the source, off the loop, that nobody will fetch."""
        if seq.handle is not None and self._transport is not None:
            self._notes.submit(self._transport.release, seq.handle)

    def _renew_leases(self) -> None:
        """Keep the leases alive of the sequences that wait here for room."""
        now = self._clock()
        if self._transport is None or now < self._renew_at:
            return
        self._renew_at = now + self._leases.lease_s / 4
        for seq in self._scheduler.waiting():
            if seq.handle is not None:
                self._notes.submit(self._transport.renew, seq.handle)

    def _sweep_leases(self) -> None:
        for request_id in self._leases.expire():
            logger.warning("%s: lease expired, its pages are free again", request_id)
        self._scheduler.pool.take_back(self._leases.take_free())

    # ------------------------------------------------------------------ telling

    def _report(self, stepped: bool) -> None:
        load = self._measure()
        changed = load != self._load
        self._load = load
        if self._outputs or stepped or changed:
            outputs, self._outputs = tuple(self._outputs), []
            self._emit(Report(outputs, load))

    def _measure(self) -> Load:
        scheduler = self._scheduler
        return replace(
            scheduler_load(scheduler, sum(self._leases.held().values())),
            step=self._steps,
            step_s=self._step_s,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=self._cached_tokens,
            chunk_tokens=self._chunk_tokens,
            predicted_ratio=scheduler.latency.ratio,
            prediction_error=scheduler.latency.error,
        )

    def _take_stock(self) -> KVLedger:
        self._sweep_leases()
        scheduler, pool = self._scheduler, self._scheduler.pool
        held = self._leases.held()
        return KVLedger(pool.num_pages, pool.num_free, pool.num_kept, scheduler.owned(), held)


def _threads(num: int, name: str) -> ThreadPoolExecutor:
    """That run wherever this process may: they are started by the loop's thread, which may have
    been given a core of its own meanwhile."""
    if not hasattr(os, "sched_setaffinity"):
        return ThreadPoolExecutor(num, name)
    return ThreadPoolExecutor(num, name, os.sched_setaffinity, (0, os.sched_getaffinity(0)))
