"""The live side of routing: what the fleet is told, and what a sequence asks for.

``serving/core`` decides. Here its picture of the workers is kept in line with what ``Pools`` says,
and its refusals become errors.
"""

import random
from collections.abc import Callable
from typing import Protocol

from serving.core.admission import Refusal, admit, admit_in_time
from serving.core.fleet import Fleet
from serving.core.predict import FORGIVEN, Ask, ReplicaView
from serving.core.prefixes import Names, Prefixes, names_of
from serving.core.router import NoRoute, RouteDecision, route
from serving.errors import NoCapacity, PromptTooLong
from serving.generation import Generation
from serving.pools import Pools, WorkerView
from workers.core.request import Request


class Routed(Protocol):
    """A sequence on its way."""

    request: Request
    generation: Generation
    output: list[int]
    lost: list[str]  # workers
    key: str  # unique


class Routing:
    """Lives on the gateway's loop."""

    def __init__(
        self, pools: Pools, clock: Callable[[], float], early_fetch: bool, key: bytes = b""
    ) -> None:
        """``key``: known to all gateways of a deployment, for the names of what they route."""
        self._pools, self._clock, self._early_fetch = pools, clock, early_fetch
        self._key = key
        self._fleet = Fleet(random.Random())
        self._prefixes = Prefixes()

    def replicas(self) -> list[ReplicaView]:
        """Who takes new work; those that are leaving only when nobody else is there."""
        self._look()
        return self._fleet.everybody(self._clock())

    def admit(self, num_unanswered: int, num_new: int, max_queue: int) -> Refusal | None:
        """Whether the queues are full."""
        self._look()
        fleet = self._fleet
        return admit(
            fleet.num_waiting,
            fleet.num_prefilling,
            len(fleet),
            num_unanswered,
            num_new,
            max_queue,
            fleet.step_s,
        )

    def admit_in_time(self, generation: Generation) -> Refusal | None:
        """Whether the longest of its prompts would have a first token in time anywhere."""
        self._look()
        now, prompt = self._clock(), max(generation.prompts, key=len)
        names = names_of(prompt, generation.cache_salt, self._key)
        total = len(prompt) + generation.sampling.max_tokens
        ask = self._ask(generation, len(prompt), total, names)
        views = self._fleet.some(ask, now)
        return admit_in_time(ask, views, now, self._fleet.demand(now))

    def route(self, seq: Routed) -> RouteDecision:
        """Where a sequence runs from now on. Raises PromptTooLong, NoCapacity."""
        self._look()
        now, fleet = self._clock(), self._fleet
        request, generation = seq.request, seq.generation
        names = names_of(request.prompt, request.cache_salt, self._key)
        ask = self._ask_of(seq, names)
        pinned = () if seq.lost else generation.pinned
        try:
            decision = route(
                ask,
                fleet.everybody(now) if pinned else fleet.some(ask, now, seq.lost),
                now,
                mode=generation.mode,
                pinned=pinned,
                avoid=seq.lost,
                demand=fleet.demand(now),
            )
        except NoRoute as error:
            if error.too_long:
                raise PromptTooLong(str(error), "prompt") from error
            raise NoCapacity(str(error)) from error
        first_s, home = decision.chosen.ttft_s, decision.decode
        fleet.sent(decision.prefill, seq.key, ask, now, decodes_at=home, first_s=first_s)
        for worker in {decision.prefill, decision.decode} if names else ():
            self._prefixes.add(names, worker, fleet.capacity(worker))
        return decision

    def expect(self, worker: str, seq: Routed) -> None:
        """A running stream will go on there."""
        self._fleet.expect(worker, seq.key, self._ask_of(seq, ()), self._clock())

    def answered(self, worker: str, seq: Routed) -> None:
        """The worker has made a token of it. Idempotent."""
        self._fleet.answered(worker, seq.key)

    def forget(self, seq: Routed) -> None:
        """It is over, or starts again elsewhere. Idempotent."""
        self._fleet.forget(seq.key)

    def finished(self, seq: Routed) -> None:
        """It has all its tokens."""
        self._fleet.finished(len(seq.output))

    def news(self) -> dict[str, list[int]]:
        """Names of what was sent where since this was asked last."""
        return self._prefixes.news()

    def hear(self, worker: str, names: list[int]) -> None:
        """Another gateway has sent that there."""
        if worker in self._fleet:
            self._prefixes.hear(names, worker, self._fleet.capacity(worker))

    def _ask_of(self, seq: Routed, names: Names) -> Ask:
        tokens = len(seq.request.prompt) + len(seq.output)
        return self._ask(seq.generation, tokens, seq.request.max_tokens_total, names)

    def _ask(self, generation: Generation, tokens: int, total: int, names: Names) -> Ask:
        most, fleet = generation.sampling.max_tokens, self._fleet
        return Ask(
            tokens=tokens,
            total_tokens=total,
            output_tokens=min(fleet.output_tokens, most),
            brief=1.0 if most <= FORGIVEN else fleet.brief,
            others_brief=fleet.brief,
            slo=generation.slo,
            priority=generation.priority,
            waited_s=max(0.0, self._clock() - generation.arrived_at),
            cached=self._prefixes.found(names),
            is_early=self._early_fetch,
        )

    def _look(self) -> None:
        """What has been reported since."""
        views = self._pools.workers()
        for view in views:
            self._see(view)
        if len(views) < len(self._fleet):
            for gone in set(self._fleet) - {view.id for view in views}:
                self._fleet.detach(gone)
                self._prefixes.drop(gone)

    def _see(self, view: WorkerView) -> None:
        fleet = self._fleet
        if view.id not in fleet:
            capacity = min(view.num_pages * view.page_size, view.max_model_len)
            fleet.attach(view.id, view.role, capacity, view.page_size, view.load, view.pace)
        if fleet.stance(view.id) != (view.role, view.is_leaving):
            fleet.stand(view.id, view.role, view.is_leaving)
        if fleet.load(view.id) is not view.load:
            fleet.heard(view.id, view.load, view.pace)
