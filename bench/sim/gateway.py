"""The front door in virtual time: live routing, admission and in-flight accounts.

A call lives as in ``serving.gateway.Gateway``: admitted, routed, submitted, handed over, replayed
when its worker is lost, let go everywhere when it ends.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.sim.clock import Clock
from bench.sim.faults import Faults
from bench.sim.outcome import Gaps, Outcome
from bench.sim.streams import Call, Streams
from bench.sim.worker import SimWorker, StepReport
from kvtransfer.core.handle import KVHandle
from serving.core.admission import admit
from serving.core.demand import DemandMeter
from serving.core.inflight import InFlight
from serving.core.router import AUTO, NoRoute, ReplicaView, rehome, route
from workers.core.output import Load
from workers.core.request import Request, Sequence

MAX_ATTEMPTS = 3  # workers that one call may lose, as live


class Channel:
    """Messages one way between the gateway and one worker: late, maybe, but in order."""

    def __init__(self, clock: Clock, faults: Faults, rng: random.Random) -> None:
        self._clock, self._faults, self._rng = clock, faults, rng
        self._last = 0.0

    def send(self, action: Callable[..., None], *args: Any) -> None:
        if not self._faults.max_delay_s:
            action(*args)
            return
        self._last = max(self._last, self._clock.now + self._faults.delay_s(self._rng))
        self._clock.at(self._last, action, *args)


@dataclass(slots=True, eq=False)
class Attached:
    """A worker as the gateway knows it."""

    worker: SimWorker
    view: ReplicaView  # without what changes
    load: Load
    channel: Channel
    streams: Streams
    is_leaving: bool = False  # takes nothing new
    replica: ReplicaView | None = None  # as it looked to the router lately,
    until: float = 0.0  # which holds so long, unless something is heard from it or sent to it


class SimGateway:
    """``ended`` gets the Outcome of each call, once."""

    def __init__(
        self,
        clock: Clock,
        faults: Faults,
        rng: random.Random,
        *,
        mode: str = AUTO,
        max_queue: int = 256,
        ended: Callable[[Call], None],
        holds: bool = False,
    ) -> None:
        self.gaps = Gaps()
        self.demand = DemandMeter()
        self._clock, self._faults, self._rng = clock, faults, rng
        self._mode, self._max_queue, self._ended = mode, max_queue, ended
        self._attached: dict[str, Attached] = {}
        self._calls: dict[str, Call] = {}
        self._in_flight = InFlight()
        self._num_unanswered = 0
        self._holds = holds  # requests wait for a worker to start, instead of being refused
        self._held: list[Call] = []

    # ------------------------------------------------------------------ workers

    def attach(self, worker: SimWorker) -> None:
        view = ReplicaView(worker.id, worker.role, worker.spec.capacity)
        load = Load(num_pages=worker.spec.num_pages, free_pages=worker.spec.num_pages)
        channel = Channel(self._clock, self._faults, self._rng)
        self._attached[worker.id] = Attached(worker, view, load, channel, Streams(self.gaps))
        held, self._held = self._held, []
        for call in held:
            if call.request.id in self._calls:
                self._route(call)

    def lose(self, worker_id: str) -> None:
        """The worker is found dead: what ran there is replayed elsewhere."""
        calls = [call for call in self._calls.values() if call.worker == worker_id]
        for call in calls:
            self._attached[worker_id].streams.leave(call)
        del self._attached[worker_id]
        for call in calls:
            self._replay(call, worker_id)

    def set_role(self, worker_id: str, role: str) -> None:
        """As live: its streams stay, or move when it is to prefill and others decode."""
        attached = self._attached[worker_id]
        attached.worker.role = role
        attached.view, attached.replica = replace(attached.view, role=role), None
        if role == "prefill":
            self._empty(worker_id)

    def retire(self, worker_id: str) -> None:
        """It takes nothing new, and its streams go elsewhere."""
        self._attached[worker_id].is_leaving = True
        self._empty(worker_id)

    def detach(self, worker_id: str) -> bool:
        """Forget a retired worker, once nothing runs there or has yet to be fetched from there."""
        worker = self._attached[worker_id].worker
        worker.abort("")  # a turn, so that it sees what was let go
        if worker.leases.held() or any(call.worker == worker_id for call in self._calls.values()):
            return False
        del self._attached[worker_id]
        return True

    def heard(self, worker_id: str, note: StepReport) -> None:
        """A worker's message has arrived."""
        attached = self._attached.get(worker_id)
        if attached is None:
            return
        attached.load, attached.replica = note.load, None
        self._take_tokens(worker_id, attached.streams, note)
        for name in note.fallbacks:
            call = self._calls.get(name)
            if call is not None:
                call.outcome.num_fallbacks += 1
        for name, why in note.errors.items():
            self._settle(worker_id, name, f"error: {why}")
        for name, why in note.finished.items():
            self._settle(worker_id, name, why)
        for name, handle in note.handles.items():
            self._hand_over(worker_id, name, handle)

    def _take_tokens(self, worker_id: str, streams: Streams, note: StepReport) -> None:
        now = self._clock.now
        if note.decodes:
            for at in note.times or [now]:
                for joined in streams.step(note.decodes, at, self._calls):
                    self._answered(joined, worker_id)
        for seq in note.prompts:
            call = self._calls.get(seq.id)
            if call is None or call.seq is not seq:
                continue  # aborted, or replayed elsewhere meanwhile
            if call.output:
                self.gaps.add(now - call.last_at)
                call.num_late += now - call.last_at > call.late_s
            else:
                call.outcome.first_at = now
            call.take(1, now)
            self._answered(call, worker_id)

    # ------------------------------------------------------------------ a call

    def arrive(self, request: Request, outcome: Outcome) -> None:
        """A new request, now."""
        slo, asked = request.slo, (len(request.prompt), request.sampling.max_tokens)
        self.demand.arrived(request.id, *asked, slo.ttft_s, slo.itl_s, self._clock.now)
        refusal = "" if self._holds else "no worker is attached"
        if self._attached:
            loads = [attached.load for attached in self._attached.values()]
            refused = admit(loads, self._num_unanswered, 1, self._max_queue)
            refusal = refused.reason if refused else ""
        call = Call(request, outcome, request.slo.itl_s)
        if refusal:
            outcome.reason = f"refused: {refusal}"
            self.demand.left(request.id)
            self._ended(call)
            return
        self._calls[request.id] = call
        self._num_unanswered += 1
        if self._attached:
            self._route(call)
        else:
            self._held.append(call)

    def leave(self, request_id: str) -> None:
        """The client goes away."""
        call = self._calls.get(request_id)
        if call is not None:
            self._end(call, "aborted")

    def _route(self, call: Call) -> None:
        request, now = call.request, self._clock.now
        try:
            decision = route(
                len(request.prompt) + len(call.output),
                request.max_tokens_total,
                self._replicas(now),
                mode=self._mode,
                avoid=call.lost,
            )
        except NoRoute as error:
            self._end(call, f"no route: {error}")
            return
        call.outcome.mode = decision.mode
        call.decode = decision.decode
        self._run(call, decision.prefill, decision.is_split, None)

    def _run(self, call: Call, worker_id: str, hand_off: bool, handle: KVHandle | None) -> None:
        attached = self._attached.get(worker_id)
        if attached is None:
            self._replay(call, worker_id)
            return
        request = call.request
        tokens = 0 if handle else len(request.prompt) + len(call.output)
        self._in_flight.add(worker_id, request.id, tokens, attached.load, self._clock.now)
        attached.replica = None
        if worker_id not in call.touched:
            call.touched.append(worker_id)
        self._collect(call)
        call.worker = worker_id
        call.seq = Sequence(request, hand_off, handle, list(call.output))
        attached.channel.send(attached.worker.submit, call.seq)

    def _hand_over(self, worker_id: str, name: str, handle: KVHandle) -> None:
        call = self._calls.get(name)
        if call is None or call.worker != worker_id:
            self._abort(worker_id, name)  # nobody will fetch
            return
        home, call.target = call.target or call.decode, ""
        if not self._takes_new(home):
            total = call.request.max_tokens_total
            home = rehome(total, self._replicas(self._clock.now), (worker_id, *call.lost)) or ""
        if home:
            self._run(call, home, False, handle)
        else:  # nobody else is there: back to where it was, computed again
            self._let_go(call)
            self._run(call, worker_id, False, None)

    def _empty(self, worker_id: str) -> None:
        """Let the streams of a worker move to where they do better."""
        attached, now = self._attached[worker_id], self._clock.now
        for call in [call for call in self._calls.values() if call.worker == worker_id]:
            homes = [r for r in self._replicas(now) if attached.is_leaving or r.role != "prefill"]
            home = rehome(call.request.max_tokens_total, homes, (worker_id, *call.lost))
            if home is not None:
                call.target = home
                attached.channel.send(attached.worker.hand_off, call.request.id)

    def _replay(self, call: Call, worker_id: str) -> None:
        """What the client has is kept and goes along."""
        self._collect(call)
        call.outcome.num_replays += 1
        self._forget(worker_id, call)
        self._let_go(call)
        call.worker = ""
        call.lost.append(worker_id)
        if len(call.lost) >= MAX_ATTEMPTS:
            self._end(call, f"unavailable: {len(call.lost)} workers were lost")
        else:
            self._route(call)

    def _settle(self, worker_id: str, name: str, why: str) -> None:
        call = self._calls.get(name)
        if call is not None and call.worker == worker_id:
            if worker_id in call.touched:
                call.touched.remove(worker_id)  # nothing of it is left there
            self._end(call, why)

    def _end(self, call: Call, why: str) -> None:
        self._collect(call)
        if call.worker:
            self._forget(call.worker, call)
        self._let_go(call)
        if not call.is_answered:
            call.is_answered = True
            self._num_unanswered -= 1
        del self._calls[call.request.id]
        self.demand.left(call.request.id)
        if call.output:
            self.demand.finished(len(call.output))
        outcome = call.outcome
        outcome.reason, outcome.last_at = why, call.last_at
        outcome.num_output, outcome.num_late = len(call.output), call.num_late
        self._ended(call)

    def _answered(self, call: Call, worker_id: str) -> None:
        """Its first token from there has come."""
        self._forget(worker_id, call)
        if not call.is_answered:
            call.is_answered = True
            self.demand.answered(call.request.id, self._clock.now)
            self._num_unanswered -= 1

    def _collect(self, call: Call) -> None:
        """Write down what its stream has brought so far, and listen no longer."""
        attached = self._attached.get(call.worker)
        if attached is not None:
            attached.streams.leave(call)

    def _forget(self, worker_id: str, call: Call) -> None:
        """It is no longer on its way to the worker: reported, or over."""
        self._in_flight.remove(worker_id, call.request.id)
        attached = self._attached.get(worker_id)
        if attached is not None:
            attached.replica = None

    def _let_go(self, call: Call) -> None:
        """A receiver before its source."""
        for worker_id in reversed(call.touched):
            self._abort(worker_id, call.request.id)
        call.touched.clear()

    def _abort(self, worker_id: str, name: str) -> None:
        attached = self._attached.get(worker_id)
        if attached is not None:
            attached.channel.send(attached.worker.abort, name)

    def _takes_new(self, worker_id: str) -> bool:
        attached = self._attached.get(worker_id)
        return attached is not None and not attached.is_leaving

    def _replicas(self, now: float) -> list[ReplicaView]:
        """Who takes new work; those that are leaving only when nobody else is there."""
        everybody = self._attached.values()
        staying = [a for a in everybody if not a.is_leaving] or everybody
        return [self._replica(attached, now) for attached in staying]

    def _replica(self, attached: Attached, now: float) -> ReplicaView:
        if attached.replica is None or now >= attached.until:
            view, load = attached.view, attached.load
            unreported = self._in_flight.unreported(view.id, load, now)
            attached.until = self._in_flight.holds_until(view.id, now)
            attached.replica = ReplicaView(
                view.id,
                view.role,
                view.capacity,
                load.queued_tokens + sum(unreported),
                load.decode_seqs,
                load.waiting_seqs + len(unreported),
            )
        return attached.replica
