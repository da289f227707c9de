"""The front door in virtual time: live routing, admission and in-flight accounts.

A call lives as in ``serving.gateway.Gateway``: admitted, routed, submitted, handed over, replayed
when its worker is lost, let go everywhere when it ends.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bench.sim.clock import Clock
from bench.sim.faults import Faults
from bench.sim.outcome import Gaps, Outcome
from bench.sim.streams import Call, Streams
from bench.sim.worker import SimWorker, StepReport
from kvtransfer.core.handle import KVHandle
from serving.core.admission import Refusal, admit, admit_in_time
from serving.core.demand import DemandMeter
from serving.core.fleet import Fleet
from serving.core.predict import FORGIVEN, Ask, ReplicaView
from serving.core.prefixes import Prefixes, names_of
from serving.core.router import AUTO, NoRoute, rehome, route
from workers.core.output import Load
from workers.core.request import Request, Sequence

NOTHING: dict[str, int] = {}
STEP_S = 0.01  # of the steps, for the advice when to come again
UNBOUNDED = 1 << 20  # waiting sequences: then nobody is ever refused
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
    channel: Channel
    streams: Streams
    is_leaving: bool = False  # takes nothing new


class SimGateway:
    """``ended`` gets the Outcome of each call, once. ``mode`` is every request's, or tells each
    one's."""

    def __init__(
        self,
        clock: Clock,
        faults: Faults,
        rng: random.Random,
        *,
        mode: str | Callable[[Request], str] = AUTO,
        max_queue: int = 256,
        sees_all: bool = False,
        ended: Callable[[Call], None],
        holds: bool = False,
    ) -> None:
        self.gaps = Gaps()
        self.demand = DemandMeter()
        self._clock, self._faults, self._rng = clock, faults, rng
        self._mode, self._max_queue, self._ended = mode, max_queue, ended
        self._attached: dict[str, Attached] = {}
        self._calls: dict[str, Call] = {}
        self._fleet = Fleet(random.Random(rng.random()), sees_all)
        self._prefixes = Prefixes()
        self._num_unanswered = 0
        self._holds = holds  # requests wait for a worker to start, instead of being refused
        self._held: list[Call] = []

    # ------------------------------------------------------------------ workers

    def attach(self, worker: SimWorker) -> None:
        spec = worker.spec
        load = Load(num_pages=spec.num_pages, free_pages=spec.num_pages)
        page_size, pace = spec.layout.page_size, worker.pace()
        self._fleet.attach(worker.id, worker.role, spec.capacity, page_size, load, pace)
        channel = Channel(self._clock, self._faults, self._rng)
        self._attached[worker.id] = Attached(worker, channel, Streams(self.gaps))
        held, self._held = self._held, []
        for call in held:
            if call.request.id in self._calls:
                self._route_again(call)

    def lose(self, worker_id: str) -> None:
        """The worker is found dead: what ran there is replayed elsewhere."""
        calls = [call for call in self._calls.values() if call.worker == worker_id]
        for call in calls:
            self._attached[worker_id].streams.leave(call)
        del self._attached[worker_id]
        self._fleet.detach(worker_id)
        self._prefixes.drop(worker_id)
        for call in calls:
            self._replay(call, worker_id)

    def set_role(self, worker_id: str, role: str) -> None:
        """As live: its streams stay, or move when it is to prefill and others decode."""
        attached = self._attached[worker_id]
        attached.worker.role = role
        self._fleet.stand(worker_id, role)
        if role == "prefill":
            self._empty(worker_id)

    def retire(self, worker_id: str) -> None:
        """It takes nothing new, and its streams go elsewhere."""
        attached = self._attached[worker_id]
        attached.is_leaving = True
        self._fleet.stand(worker_id, attached.worker.role, is_leaving=True)
        self._empty(worker_id)

    def detach(self, worker_id: str) -> bool:
        """Forget a retired worker, once nothing runs there or has yet to be fetched from there."""
        worker = self._attached[worker_id].worker
        worker.abort("")  # a turn, so that it sees what was let go
        if worker.leases.held() or any(call.worker == worker_id for call in self._calls.values()):
            return False
        del self._attached[worker_id]
        self._fleet.detach(worker_id)
        self._prefixes.drop(worker_id)
        return True

    def heard(self, worker_id: str, note: StepReport) -> None:
        """A worker's message has arrived."""
        attached = self._attached.get(worker_id)
        if attached is None:
            return
        self._fleet.heard(worker_id, note.load, note.pace)
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
        call = Call(request, outcome, request.slo.itl_s)
        refusal = "" if self._holds else "no worker is attached"
        ask, views = self._ask(call), []
        if self._attached:
            views = self._look(self._fleet.draw(ask))
            refused = self._admit(ask, views)
            refusal = refused.reason if refused else ""
        if refusal:
            outcome.reason = f"refused: {refusal}"
            self.demand.left(request.id)
            self._ended(call)
            return
        self._calls[request.id] = call
        self._num_unanswered += 1
        if self._attached:
            self._route(call, ask, views)
        else:
            self._held.append(call)

    def _admit(self, ask: Ask, views: list[ReplicaView]) -> Refusal | None:
        fleet, num_unanswered = self._fleet, self._num_unanswered
        waiting, prefilling, num = fleet.num_waiting, fleet.num_prefilling, len(fleet)
        refusal = admit(waiting, prefilling, num, num_unanswered, 1, self._max_queue, STEP_S)
        if refusal is not None or self._max_queue >= UNBOUNDED:
            return refusal
        now = self._clock.now
        return admit_in_time(ask, views, now, fleet.demand(now))

    def leave(self, request_id: str) -> None:
        """The client goes away."""
        call = self._calls.get(request_id)
        if call is not None:
            self._end(call, "aborted")

    def _route_again(self, call: Call) -> None:
        ask = self._ask(call)
        self._route(call, ask, self._look(self._fleet.draw(ask, call.lost)))

    def _route(self, call: Call, ask: Ask, views: list[ReplicaView]) -> None:
        now, fleet, mode = self._clock.now, self._fleet, self._mode
        if not isinstance(mode, str):
            mode = mode(call.request)
        try:
            demand = fleet.demand(now)
            decision = route(ask, views, now, mode=mode, avoid=call.lost, demand=demand)
        except NoRoute as error:
            self._end(call, f"no route: {error}")
            return
        call.outcome.mode = decision.mode
        call.decode = decision.decode
        first_s, home = decision.chosen.ttft_s, decision.decode
        fleet.sent(decision.prefill, call.request.id, ask, now, decodes_at=home, first_s=first_s)
        for worker in {decision.prefill, decision.decode} if call.names else ():
            self._prefixes.add(call.names, worker, fleet.capacity(worker))
        self._run(call, decision.prefill, decision.is_split, None)

    def _ask(self, call: Call) -> Ask:
        request = call.request
        if request.prompt and not request.cache_salt:  # else it shares with nobody
            call.names = call.names or names_of(request.prompt, "")
        return Ask(
            tokens=len(request.prompt) + len(call.output),
            total_tokens=request.max_tokens_total,
            output_tokens=min(self._fleet.output_tokens, request.sampling.max_tokens),
            brief=1.0 if request.sampling.max_tokens <= FORGIVEN else self._fleet.brief,
            others_brief=self._fleet.brief,
            slo=request.slo,
            priority=request.priority,
            waited_s=self._clock.now - request.arrived_at,
            cached=self._prefixes.found(call.names) if call.names else NOTHING,
        )

    def _run(self, call: Call, worker_id: str, hand_off: bool, handle: KVHandle | None) -> None:
        attached = self._attached.get(worker_id)
        if attached is None:
            self._replay(call, worker_id)
            return
        request = call.request
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
            total, homes = call.request.max_tokens_total, self._everybody()
            home = rehome(total, homes, (worker_id, *call.lost)) or ""
        if home and home != call.decode:
            self._fleet.expect(home, call.request.id, self._ask(call), self._clock.now)
        if home:
            self._run(call, home, False, handle)
        else:  # nobody else is there: back to where it was, computed again
            self._let_go(call)
            self._run(call, worker_id, False, None)

    def _empty(self, worker_id: str) -> None:
        """Let the streams of a worker move to where they do better."""
        attached = self._attached[worker_id]
        for call in [call for call in self._calls.values() if call.worker == worker_id]:
            everybody = self._everybody()
            homes = [r for r in everybody if attached.is_leaving or r.role != "prefill"]
            home = rehome(call.request.max_tokens_total, homes, (worker_id, *call.lost))
            if home is not None:
                call.target = home
                attached.channel.send(attached.worker.hand_off, call.request.id)

    def _replay(self, call: Call, worker_id: str) -> None:
        """What the client has is kept and goes along."""
        self._collect(call)
        call.outcome.num_replays += 1
        self._fleet.forget(call.request.id)
        self._let_go(call)
        call.worker = ""
        call.lost.append(worker_id)
        if len(call.lost) >= MAX_ATTEMPTS:
            self._end(call, f"unavailable: {len(call.lost)} workers were lost")
        else:
            self._route_again(call)

    def _settle(self, worker_id: str, name: str, why: str) -> None:
        call = self._calls.get(name)
        if call is not None and call.worker == worker_id:
            if worker_id in call.touched:
                call.touched.remove(worker_id)  # nothing of it is left there
            self._end(call, why)

    def _end(self, call: Call, why: str) -> None:
        self._collect(call)
        self._fleet.forget(call.request.id)
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
        self._fleet.finished(outcome.num_output)
        self._ended(call)

    def _answered(self, call: Call, worker_id: str) -> None:
        """Its first token from there has come."""
        self._fleet.answered(worker_id, call.request.id)
        if not call.is_answered:
            call.is_answered = True
            self.demand.answered(call.request.id, self._clock.now)
            self._num_unanswered -= 1

    def _collect(self, call: Call) -> None:
        """Write down what its stream has brought so far, and listen no longer."""
        attached = self._attached.get(call.worker)
        if attached is not None:
            attached.streams.leave(call)

    def _let_go(self, call: Call) -> None:
        """A receiver before its source."""
        for worker_id in reversed(call.touched):
            self._abort(worker_id, call.request.id)
        call.touched.clear()

    def _abort(self, worker_id: str, name: str) -> None:
        attached = self._attached.get(worker_id)
        if attached is not None:
            attached.channel.send(attached.worker.abort, name)

    def _everybody(self) -> list[ReplicaView]:
        return self._look(self._fleet.names)

    def _look(self, names: Iterable[str]) -> list[ReplicaView]:
        """At workers as they are now, whatever they have skipped."""
        now, views = self._clock.now, []
        for name in names:
            self._attached[name].worker.catch_up()
            views.append(self._fleet.look(name, now))
        return views

    def _takes_new(self, worker_id: str) -> bool:
        attached = self._attached.get(worker_id)
        return attached is not None and not attached.is_leaving
