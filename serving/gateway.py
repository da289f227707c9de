"""A call's life between the front door and the workers: admit, route, submit, replay, let go.

It knows neither HTTP nor gRPC (``serving.api`` does) nor how tokens travel (``Pools`` does).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvtransfer.core.handle import KVHandle
from serving.choice import Choice
from serving.core.demand import STEADY_S, DemandMeter
from serving.core.router import RouteDecision
from serving.errors import (
    Aborted,
    BadRequest,
    Internal,
    Overloaded,
    RequestFailed,
    Unavailable,
)
from serving.explain import note_decision, note_first_token, regret
from serving.generation import Delta, Final, Generation, call_id
from serving.metrics import Metrics
from serving.moves import Moves
from serving.peers import Peers
from serving.pools import Pools, Submission, WorkerLost, WorkerView
from serving.prefix_news import PrefixNews
from serving.recording import Recorder
from serving.routing import Routing
from serving.running import Call, Seq, explanation_of, note_timing, seq_of, usage_of
from serving.state import MemoryStore, StateStore
from serving.tokenizer import Tokenizer
from workers.core.output import Output, Timing

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # workers that one sequence may lose
RECENT = 50  # ended calls that are shown
EXPLAIN_S = 600.0  # how long the trace of a finished request is kept


@dataclass(frozen=True, slots=True)
class Limits:
    """The longest sequence that the attached workers take."""

    max_model_len: int
    pool_tokens: int  # of the largest empty pool
    common_tokens: int  # what every worker takes, by context and pool


class Scaling(Protocol):
    """``serving.scaler.Scaler``, as the front doors see it."""

    async def scale(self, pool: str, num: int) -> None: ...
    def status(self) -> dict[str, Any]: ...


class Tracing(Protocol):
    """``serving.tracing.Tracing``."""

    def note(self, call: Call, model: str) -> None: ...


class Gateway:
    """Lives on one event loop. Owns every task that it starts, for as long as the call lives."""

    def __init__(
        self,
        pools: Pools,
        tokenizer: Tokenizer,
        *,
        model: str,
        max_queue: int = 256,
        early_fetch: bool = True,
        in_time: bool = False,
        store: StateStore | None = None,
        recorder: Recorder | None = None,
        tracing: Tracing | None = None,
        demand_window_s: float = STEADY_S,
        secret: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pools = pools
        self.tokenizer = tokenizer
        self.model = model
        self.clock = clock
        self.metrics = Metrics(model, pools.workers)
        self.demand = DemandMeter(clock(), demand_window_s)
        self.scaler: Scaling | None = None  # once somebody scales
        self._max_queue = max_queue
        self._early_fetch, self._in_time = early_fetch, in_time
        self._store: StateStore = store or MemoryStore()
        self._recorder, self._tracing = recorder, tracing
        self._calls: dict[str, Call] = {}
        self._recent: deque[tuple[str, dict[str, Any]]] = deque(maxlen=RECENT)
        self._routing = Routing(pools, clock, early_fetch, secret)
        self._num_unanswered = 0  # sequences without a token yet
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.peers = Peers(self._store, self._facts)
        self.prefix_news = PrefixNews(self._store, self._routing, self.peers)
        self.moves = Moves(pools, self._routing.replicas, self._running)

    # ------------------------------------------------------------------ one call

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices as they come; the last one has the final. Raises RequestFailed.

        Closing the iterator, at any time, ends the call on every worker: use ``aclosing``.
        """
        self.metrics.started()
        try:
            call = self._admit(generation)
        except RequestFailed as error:
            self.metrics.ended(type(error).__name__)
            raise
        try:
            call.tasks = [
                asyncio.create_task(self._answer(call, index)) for index in range(len(call.seqs))
            ]
            num_open = len(call.seqs)
            while num_open:
                delta = await call.deltas.get()
                if isinstance(delta, RequestFailed):
                    raise delta
                num_open -= delta.finish_reason is not None
                yield delta if num_open else replace(delta, final=self._final(call))
        except RequestFailed as error:
            call.error = type(error).__name__
            call.outcome = "aborted" if isinstance(error, Aborted) else f"failed: {error.message}"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if call.outcome == "running":
                call.outcome, call.error = "aborted", Aborted.__name__
            raise
        finally:
            await self._end(call)

    async def _answer(self, call: Call, index: int) -> None:
        """One choice from start to end: its deltas, or the error that ends the call."""
        seq = call.seqs[index]
        choice = Choice(call.generation, index, self.tokenizer)
        try:
            async with aclosing(self._outputs(seq)) as outputs:
                async for output in outputs:
                    delta = self._take(seq, choice, output)
                    if delta is None:
                        continue
                    if delta.finish_reason is not None:
                        self._finish(seq, delta.finish_reason)
                    call.deltas.put(delta)
                    if delta.finish_reason is not None:
                        return
            raise Internal(f"request {call.generation.id}: its worker stopped without a reason")
        except RequestFailed as error:
            call.deltas.put(error)
        except Exception:
            logger.exception("request %s failed", call.generation.id)
            call.deltas.put(Internal(f"request {call.generation.id} failed in the gateway"))
        finally:
            self._let_go(seq)

    async def _outputs(self, seq: Seq) -> AsyncGenerator[Output, None]:
        """Everything that workers say about one sequence, wherever it runs."""
        while True:
            decision = self._route(seq)
            worker, hand_off = decision.prefill, decision.is_split
            try:
                while True:
                    async with aclosing(self._run(worker, seq, hand_off)) as outputs:
                        async for output in outputs:
                            if output.promise is not None:
                                self._reserve(seq, decision, output.promise)
                            else:
                                yield output
                    if seq.handle is None:
                        return
                    if hand_off and self.moves.takes_new(decision.decode):
                        worker = decision.decode
                    else:
                        self._take_back(seq, decision)
                        worker = self._elsewhere(seq, worker)
                    hand_off = False
            except WorkerLost as error:
                self._lose(seq, worker, error)

    async def _run(self, worker: str, seq: Seq, hand_off: bool) -> AsyncGenerator[Output, None]:
        """What one worker contributes: ends with a finish_reason, or with ``seq.handle`` set."""
        held = (worker, seq.request.id)
        if held not in seq.touched:
            seq.touched.append(held)
        seq.at = worker
        if seq.trace.workers[-1:] != [worker]:
            seq.trace.workers.append(worker)
        timing, is_told = Timing(), False  # as this worker last told it
        async with aclosing(self.pools.submit(worker, seq.submission(hand_off))) as stream:
            async for output in stream:
                if output.token is not None and not is_told:
                    is_told = True
                    self._routing.answered(worker, seq)
                if output.timing is not None:
                    note_timing(seq.trace, timing, output.timing)
                    timing = output.timing
                seq.handle = output.handle
                if output.finish_reason is not None and held in seq.touched:
                    seq.touched.remove(held)  # nothing of it is left there
                yield output

    def _reserve(self, seq: Seq, decision: RouteDecision, promise: KVHandle) -> None:
        """The decode worker may fetch pages while the prefill worker computes the rest."""
        if self._early_fetch and decision.is_split and self.moves.takes_new(decision.decode):
            seq.touched.append((decision.decode, seq.request.id))
            early = Submission(seq.request, tuple(seq.output), handle=promise, early=True)
            self.pools.reserve(decision.decode, early)

    def _take_back(self, seq: Seq, decision: RouteDecision) -> None:
        """It goes elsewhere: nothing is left of what was reserved, and may be running already."""
        reserved = (decision.decode, seq.request.id)
        if reserved in seq.touched and seq.at != decision.decode:
            seq.touched.remove(reserved)
            self.pools.abort(*reserved)

    # ------------------------------------------------------------------ its turns

    def _admit(self, generation: Generation) -> Call:
        if self._is_draining:
            raise Unavailable("this server is shutting down")
        workers = [view for view in self.pools.workers() if not view.is_leaving]
        if not workers:
            raise Unavailable("no worker that takes requests is attached; see /ready")
        if generation.call_id in self._calls:
            raise BadRequest(f"a request with id {generation.id!r} is running", "request_id")
        refusal = self._routing.admit(self._num_unanswered, generation.num_choices, self._max_queue)
        if refusal is None and self._in_time:
            refusal = self._routing.admit_in_time(generation)
        call = Call(generation, [seq_of(generation, i) for i in range(generation.num_choices)])
        if refusal is not None:
            call.outcome = "refused"
            self._record(call)
            raise Overloaded(f"overloaded: {refusal.reason}", refusal.retry_after_s)
        self._calls[generation.call_id] = call
        self._num_unanswered += len(call.seqs)
        self._idle.clear()
        self.metrics.arrived(sum(len(prompt) for prompt in generation.prompts))
        for seq in call.seqs:
            self._note_arrived(seq)
        return call

    def _route(self, seq: Seq) -> RouteDecision:
        decision = self._routing.route(seq)
        note_decision(seq.trace, decision)
        if not seq.output:
            self.metrics.routed(decision.mode)
        return decision

    def _elsewhere(self, seq: Seq, source: str) -> str:
        """Where a sequence goes on that was handed off to be moved. When nobody else is there any
        more: back to where it was, computed again."""
        home = self.moves.home(seq, (source, *seq.lost))
        if home is not None:
            seq.trace.num_moves += 1
            seq.rename()
            self._routing.expect(home, seq)
            return home
        self._let_go(seq)
        seq.handle = None
        seq.rename()
        seq.trace.fallback = "it was moved with nowhere to go"
        self.metrics.fell_back("move")
        return source

    def _take(self, seq: Seq, choice: Choice, output: Output) -> Delta | None:
        """Account for one output and turn it into text. Raises RequestFailed."""
        if output.fallback is not None:
            seq.trace.fallback = output.fallback
            self.metrics.fell_back("transfer")
        if output.finish_reason == "error":
            raise Internal(f"request {seq.generation.id} failed on its worker: {output.error}")
        if output.finish_reason == "abort":
            raise Aborted(f"request {seq.generation.id} was aborted")
        if output.token is None:
            return choice.end(output.finish_reason) if output.finish_reason else None
        delta = choice.feed(output.token, output.finish_reason)
        seq.output.append(output.token.id)
        self._note_token(seq)
        return delta

    def _note_arrived(self, seq: Seq) -> None:
        request, slo = seq.request, seq.request.slo
        asked = len(request.prompt), request.sampling.max_tokens
        self.demand.arrived(seq.key, *asked, slo.ttft_s, slo.itl_s, seq.generation.arrived_at)

    def _note_token(self, seq: Seq) -> None:
        now, trace = self.clock(), seq.trace
        if seq.first_at:
            gap_s = now - seq.last_at
            self.metrics.next_token(gap_s)
            late = gap_s > seq.request.slo.itl_s
            self.demand.gaps(1, late)
            trace.second_s = trace.second_s or gap_s
            trace.worst_itl_s = max(trace.worst_itl_s, gap_s)
            trace.late_gaps += late
        else:
            seq.first_at = now
            note_first_token(trace, now - seq.generation.arrived_at)
            self.metrics.first_token(trace.ttft_s)
            self._note_answered(seq)
        seq.last_at = now

    def _note_answered(self, seq: Seq) -> None:
        if not seq.is_answered:
            seq.is_answered = True
            self._num_unanswered -= 1
            if seq.first_at:
                self.demand.answered(seq.key, seq.first_at)
            else:
                self.demand.left(seq.key)

    def _lose(self, seq: Seq, worker: str, error: WorkerLost) -> None:
        """Forget where the sequence was; what the client has is kept and goes into the replay."""
        logger.warning("request %s: %s", seq.request.id, error)
        self._let_go(seq)
        seq.handle = None
        seq.lost.append(worker)
        seq.rename()
        seq.trace.fallback = f"{worker} was lost after {len(seq.output)} tokens; replayed"
        self.metrics.fell_back("worker lost")
        if len(seq.lost) >= MAX_ATTEMPTS:
            raise Unavailable(f"{len(seq.lost)} workers were lost one after another") from error

    def _finish(self, seq: Seq, reason: str) -> None:
        """The answer is complete. What a worker still computes for it is stopped."""
        self._let_go(seq)
        trace = seq.trace
        self._routing.finished(seq)
        trace.outcome, trace.decode_worker = reason, trace.workers[-1]
        trace.decode_s = max(0.0, seq.last_at - seq.first_at - trace.transfer_s)
        self.demand.finished(len(seq.output))
        trace.itl_s = (seq.last_at - seq.first_at) / max(1, len(seq.output) - 1)
        slo = seq.request.slo
        self.metrics.finished(reason, self.clock() - seq.generation.arrived_at, trace)
        self.metrics.judged(trace, regret(trace, slo.ttft_s, slo.itl_s))

    def _let_go(self, seq: Seq) -> None:
        """Tell every worker that may hold pages of it, a receiver before its source. Idempotent."""
        self._routing.forget(seq)
        for worker, request_id in reversed(seq.touched):
            self.pools.abort(worker, request_id)
        seq.touched.clear()

    def _final(self, call: Call) -> Final:
        trace = call.seqs[0].trace
        for seq in call.seqs[1:]:
            trace.workers.extend(w for w in seq.trace.workers if w not in trace.workers)
            trace.fallback = trace.fallback or seq.trace.fallback
        call.outcome = trace.outcome
        return Final(usage_of(call), trace)

    async def _end(self, call: Call) -> None:
        """However the call ended: nothing of it is left on a worker or here."""
        for seq in call.seqs:
            self._let_go(seq)
            self._note_answered(seq)
        for task in call.tasks:
            task.cancel()
        self._calls.pop(call.generation.call_id, None)
        if not self._calls:
            self._idle.set()
        self.metrics.ended(call.error)
        await asyncio.gather(*call.tasks, return_exceptions=True)
        self._record(call)
        if self._tracing is not None:
            self._tracing.note(call, self.model)
        explanation = explanation_of(call)
        self._recent.appendleft((call.generation.tenant, explanation))
        await self._store.set(f"request:{call.generation.call_id}", explanation, EXPLAIN_S)

    def _record(self, call: Call) -> None:
        if self._recorder is None:
            return
        for seq in call.seqs:
            trace = seq.trace
            is_open = trace.outcome == "running"
            self._recorder.note(
                seq.request,
                output_tokens=len(seq.output),
                outcome=call.outcome.split(":")[0] if is_open else trace.outcome,
                mode=trace.mode,
                first_at=seq.first_at,
                last_at=seq.last_at,
                cached_tokens=trace.cached_tokens,
                num_preemptions=trace.num_preemptions,
                fell_back=bool(trace.fallback),
            )

    # ------------------------------------------------------------------ what others ask

    def move(self, request_id: str, worker: str) -> bool:
        """Let a running call go on there. False when there is no such call here. NotFound when
        there is no such worker."""
        calls = [c for c in self._calls.values() if c.generation.id == request_id]
        for seq in [seq for call in calls for seq in call.seqs]:
            self.moves.move(seq, worker)
        return bool(calls)

    def abort(self, request_id: str, tenant: str = "") -> bool:
        """End a running call; its stream gets Aborted. False when there is none."""
        call = self._calls.get(call_id(tenant, request_id))
        if call is None:
            return False
        for seq in call.seqs:
            self._let_go(seq)
        for task in call.tasks:
            task.cancel()
        call.deltas.put(Aborted(f"request {request_id} was aborted"))
        return True

    def mode(self, request_id: str, tenant: str = "") -> str:
        """In which mode a running call runs; "" before it is routed."""
        call = self._calls.get(call_id(tenant, request_id))
        return call.seqs[0].trace.mode if call else ""

    async def explain(self, request_id: str, tenant: str = "") -> dict[str, Any] | None:
        """The trace of a running or recent call."""
        name = call_id(tenant, request_id)
        call = self._calls.get(name)
        if call is not None:
            return explanation_of(call)
        stored = await self._store.get(f"request:{name}")
        return None if stored is None else dict(stored)

    def recent(self, tenant: str = "") -> list[dict[str, Any]]:
        """The traces of the last calls that ended here, newest first."""
        return [explanation for owner, explanation in self._recent if owner == tenant]

    def limits(self) -> Limits:
        """Raises Unavailable while no worker is attached."""
        workers = self.pools.workers()
        if not workers:
            raise Unavailable("no worker is attached yet; see /ready")
        return Limits(
            max_model_len=max(w.max_model_len for w in workers),
            pool_tokens=max(w.num_pages * w.page_size for w in workers),
            common_tokens=min(_capacity(w) for w in workers),
        )

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and bool(self.pools.workers())

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def _facts(self) -> dict[str, Any]:
        """What other gateways may know."""
        workers = sorted(view.id for view in self.pools.workers())
        return {"ready": self.is_ready, "num_calls": self.num_calls, "workers": workers}

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for the running ones; False when some are left."""
        self._is_draining = True
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _running(self) -> list[Seq]:
        return [seq for call in self._calls.values() for seq in call.seqs]


def _capacity(view: WorkerView) -> int:
    """Tokens of one sequence that the worker can hold."""
    return min(view.num_pages * view.page_size, view.max_model_len)
