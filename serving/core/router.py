"""Which workers serve a request, and why. Mixed serving is the case prefill == decode.

Every way is predicted (``serving/core/predict.py``) and priced, in promises broken:

    price = late      chance that the request's own promises (first token, gaps) are broken
          + harm      promises to others that are broken for it: prompts behind it, running streams
          + PER_COST  * its GPU seconds, in units of what it costs where it is cheapest
          + PER_WAIT  * its predicted time to first token, in units of what was promised
          + ROLE      for each worker that would rather do something else

The cheapest way wins; disaggregated has to be clearly cheaper than mixed, for it keeps two workers
and the way between them busy. Roles are preferences.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from serving.core.predict import (
    Ask,
    Demand,
    Prompt,
    ReplicaView,
    Stream,
    decode_step_s,
    gap_after,
    late_again,
    late_gap,
    prompt_on,
    stream_on,
)

AUTO, MIXED, DISAGGREGATED = "auto", "mixed", "disaggregated"

PER_COST = 0.02
PER_WAIT = 0.05
ROLE = 0.6  # promises; what a role is for is worth more than one request sees
LITTLE = 0.1  # of it is the least that another role costs
MARGIN = 0.01  # promises; disaggregated is at least so much cheaper, or it stays mixed
KEPT = 3  # halves of each kind that are combined
SAME_COST, MOST_COST = 1.1, 10.0  # times the least: up to the one, and from the other on, no matter
MOST_WAIT = 20.0  # promises of first tokens; later than this is all the same
SHOWN = 16  # workers that a refusal names

NO_DEMAND = Demand()

# Of the roles that can do something, those with the least rank do it.
SERVE_MIXED = {"mixed": 0, "decode": 1, "prefill": 2}
SERVE_PREFILL = {"prefill": 0, "mixed": 1, "decode": 2}
SERVE_DECODE = {"decode": 0, "mixed": 1, "prefill": 2}
# Times ROLE. A stream on a prefill worker spoils it: every step there has to keep to the stream's
# gaps for as long as it lasts.
MISFIT_PROMPT = {"prefill": 0, "mixed": 0, "decode": 1}
MISFIT_STREAM = {"decode": 0, "mixed": 0, "prefill": 5}


class Candidate(NamedTuple):
    """One way to serve the request, and what is predicted of it."""

    prefill: str
    decode: str
    queue_s: float
    prefill_s: float
    transfer_s: float  # of the KV, as far as it does not happen while the prompt is computed
    itl_s: float
    late_ttft: float  # chance that the first token comes later than promised
    late_itl: float  # chance that gaps are longer than promised
    harm: float  # promises to other requests that it breaks
    gpu_s: float
    price: float

    @property
    def is_split(self) -> bool:
        return self.prefill != self.decode

    @property
    def ttft_s(self) -> float:
        """From now on."""
        return self.queue_s + self.prefill_s

    @property
    def loss(self) -> float:
        """Promises that are expected to be broken."""
        return 1.0 - (1.0 - self.late_ttft) * (1.0 - self.late_itl) + self.harm


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Where to, and what else was weighed (the cheapest first)."""

    ask: Ask
    prefill: str
    decode: str
    candidates: tuple[Candidate, ...]
    wish: str = ""  # of the request, which left no choice

    @property
    def reason(self) -> str:
        """Why, in words."""
        text = describe(self.ask, self.chosen)
        if self.wish:
            return f"{text}; {self.wish}"
        if self.other is None:
            return f"{text}; no worker offers the other mode"
        return f"{text}; {compare(self.chosen, self.other)}"

    @property
    def is_split(self) -> bool:
        return self.prefill != self.decode

    @property
    def mode(self) -> str:
        return DISAGGREGATED if self.is_split else MIXED

    @property
    def chosen(self) -> Candidate:
        pair = (self.prefill, self.decode)
        return next(c for c in self.candidates if (c.prefill, c.decode) == pair)

    @property
    def other(self) -> Candidate | None:
        """The cheapest way in the other mode."""
        return next((c for c in self.candidates if c.is_split != self.is_split), None)


class NoRoute(Exception):
    """No worker can serve it. ``too_long``: not even when all of them are idle."""

    def __init__(self, message: str, too_long: bool = False) -> None:
        super().__init__(message)
        self.too_long = too_long


def route(
    ask: Ask,
    replicas: Sequence[ReplicaView],
    now: float,
    *,
    mode: str = AUTO,
    pinned: Sequence[str] = (),
    avoid: Collection[str] = (),
    demand: Demand = NO_DEMAND,
) -> RouteDecision:
    """The cheapest way to serve a request.

    ``pinned`` names the worker, or the prefill and the decode worker. Workers in ``avoid`` (they
    just failed this request) are used only when nobody else is left, and a mode that they alone
    made possible is given up before the request is. Raises NoRoute.
    """
    if not replicas:
        raise NoRoute("no worker is attached")
    if pinned:
        return _pinned(ask, replicas, now, mode, pinned)
    usable = [r for r in replicas if r.id not in avoid] or list(replicas)
    halves = _Halves(ask, usable, now, demand)
    ways = [] if mode == DISAGGREGATED else halves.mixed(mode)
    if mode != MIXED:
        ways += halves.split(share=not ways)
    if not ways and avoid and mode != AUTO:
        return route(ask, replicas, now, avoid=avoid, demand=demand)
    if not ways:
        raise _no_route(ask, usable, mode)
    return _decide(ask, ways, mode)


def rehome(
    total_tokens: int, replicas: Sequence[ReplicaView], avoid: Collection[str] = ()
) -> str | None:
    """Where a running stream goes on best that leaves its worker; None when nobody can take it."""
    fit = [r for r in replicas if r.id not in avoid and r.capacity >= total_tokens]
    best = min(fit, key=_as_home, default=None)
    return None if best is None else best.id


def _as_home(r: ReplicaView) -> tuple[int, float, str]:
    streams, context = r.decode_seqs + r.coming_seqs, r.context_tokens + r.coming_tokens
    crowd = decode_step_s(r.pace, streams + r.waiting_seqs, context + r.queued_tokens)
    return SERVE_DECODE[r.role], crowd, r.id


def _decide(ask: Ask, ways: list[Candidate], mode: str) -> RouteDecision:
    ways.sort(key=_price)
    chosen = ways[0]
    if chosen.is_split:
        mixed = next((c for c in ways if not c.is_split), None)
        if mixed is not None and mixed.price - chosen.price < MARGIN:
            chosen = mixed
    wish = "" if mode == AUTO else "the request asked for this mode"
    return RouteDecision(ask, chosen.prefill, chosen.decode, tuple(ways), wish)


class _Halves:
    """The request's prompt and its stream on each of the workers, and what pairs of them cost."""

    def __init__(
        self, ask: Ask, replicas: Sequence[ReplicaView], now: float, demand: Demand
    ) -> None:
        self.ask, yard = ask, replicas[0].pace
        self.prompts = [prompt_on(ask, r, now, yard) for r in replicas if r.capacity >= ask.tokens]
        self.streams = [
            stream_on(ask, r, now, yard) for r in replicas if r.capacity >= ask.total_tokens
        ]
        self._least_s = min((p.gpu_s for p in self.prompts), default=0.0) + min(
            (s.gpu_s for s in self.streams), default=0.0
        )
        self._demand, self._shares = demand, [p.share for p in self.prompts]

    def mixed(self, mode: str) -> list[Candidate]:
        """Each worker by itself; when mixed was asked for, those whose role fits best."""
        by_id = {s.worker.id: s for s in self.streams}
        pairs = [(p, s) for p in self.prompts if (s := by_id.get(p.worker.id)) is not None]
        if mode == MIXED:
            best = min((SERVE_MIXED[p.worker.role] for p, _ in pairs), default=0)
            pairs = [(p, s) for p, s in pairs if SERVE_MIXED[p.worker.role] == best]
        return sorted((self.pair(p, s) for p, s in pairs), key=_price)[:KEPT]

    def split(self, share: bool) -> list[Candidate]:
        """Pairs of the best halves of the roles that fit best: a pair costs about what its halves
        cost. ``share`` lets two mixed workers be a pair; else these share by routing alone."""
        prompts = _of_each_role(self.prompts, self._prompt_price)
        streams = _of_each_role(self.streams, self._stream_price)
        kinds = sorted(
            (SERVE_PREFILL[role] + SERVE_DECODE[other], role, other)
            for role in prompts
            for other in streams
            if share or (role, other) != ("mixed", "mixed")
        )
        found: list[Candidate] = []
        best = -1
        for rank, role, other in kinds:
            if found and rank > best:
                break
            best = rank
            found += [
                self.pair(p, s)
                for p in prompts[role]
                for s in streams[other]
                if p.worker.id != s.worker.id
            ]
        return found

    def pair(self, p: Prompt, s: Stream) -> Candidate:
        ask, is_split = self.ask, p.worker.id != s.worker.id
        late_ttft, late_itl, room_s, moved_s = p.late, s.late, s.room_s, 0.0
        if is_split:
            moved_s = s.worker.pace.transfer_s(p.last_tokens) + room_s
            gap_s = gap_after(p.queue_s + p.prefill_s, moved_s, s)
            gap = late_gap(gap_s, ask, s.worker.pace.spread)
            late_itl = 1.0 - (1.0 - late_itl) * (1.0 - gap)
        elif room_s:  # the prompt itself waits for room
            late_ttft = late_again(ask, p, room_s)
        queue_s = p.queue_s if is_split else p.queue_s + room_s
        gpu_s, harm = p.gpu_s + s.gpu_s, p.harm + s.harm + self._spoiled(s)
        misfit = _prompt_misfit(p) + _stream_misfit(s)
        price = (
            1.0 - (1.0 - late_ttft) * (1.0 - late_itl) + harm
            + PER_COST * min(MOST_COST, max(0.0, gpu_s / self._least_s - SAME_COST))
            + self._wait_price(queue_s + p.prefill_s)
            + ROLE * misfit
        )  # fmt: skip
        return Candidate(
            p.worker.id, s.worker.id, queue_s, p.prefill_s, moved_s, s.itl_s,
            late_ttft, late_itl, harm, gpu_s, price,
        )  # fmt: skip

    def _wait_price(self, ttft_s: float) -> float:
        return PER_WAIT * min(MOST_WAIT, ttft_s / max(1e-3, self.ask.slo.ttft_s))

    def _spoiled(self, s: Stream) -> float:
        """Prompts to come that a stream keeps from a worker whose role is to compute them."""
        if s.worker.role != "prefill":
            return 0.0
        return self._demand.unserved(self._shares, s.taken_s)

    def _prompt_price(self, p: Prompt) -> float:
        wait = self._wait_price(p.queue_s + p.prefill_s)
        return p.late + p.harm + wait + ROLE * _prompt_misfit(p)

    def _stream_price(self, s: Stream) -> float:
        cost = PER_COST * s.gpu_s / self._least_s
        return s.late + s.harm + self._spoiled(s) + cost + ROLE * _stream_misfit(s) + s.room_s


def _prompt_misfit(p: Prompt) -> float:
    """Where streams have all the room that they need, little is lost."""
    return MISFIT_PROMPT[p.worker.role] * max(LITTLE, p.tightness)


def _stream_misfit(s: Stream) -> float:
    """Where a stream leaves prompts nearly all their time, little is lost."""
    return MISFIT_STREAM[s.worker.role] * max(LITTLE, s.taken)


Half = TypeVar("Half", Prompt, Stream)


def _of_each_role(halves: Sequence[Half], price: Callable[[Half], float]) -> dict[str, list[Half]]:
    """The best ones."""
    groups: dict[str, list[Half]] = {}
    for half in halves:
        groups.setdefault(half.worker.role, []).append(half)
    return {
        role: group if len(group) <= KEPT else sorted(group, key=price)[:KEPT]
        for role, group in groups.items()
    }


def _pinned(
    ask: Ask, replicas: Sequence[ReplicaView], now: float, mode: str, pinned: Sequence[str]
) -> RouteDecision:
    by_id = {r.id: r for r in replicas}
    for name in pinned:
        if name not in by_id:
            raise NoRoute(f"no worker {name!r} is attached; there are {', '.join(sorted(by_id))}")
    p, d = by_id[pinned[0]], by_id[pinned[-1]]
    if mode != AUTO and (mode == DISAGGREGATED) != (p is not d):
        raise NoRoute(f"mode {mode} does not fit the pinned workers {', '.join(pinned)}")
    if p.capacity < ask.tokens or d.capacity < ask.total_tokens:
        raise _no_route(ask, [p, d], mode)
    halves = _Halves(ask, [p, d], now, NO_DEMAND)
    chosen = halves.pair(halves.prompts[0], halves.streams[-1])
    return RouteDecision(ask, p.id, d.id, (chosen,), "pinned")


def _no_route(ask: Ask, usable: Sequence[ReplicaView], mode: str) -> NoRoute:
    names = ", ".join(f"{r.id} ({r.role}, {r.capacity} tokens)" for r in usable[:SHOWN])
    if mode == DISAGGREGATED and len(usable) < 2:
        return NoRoute(f"mode disaggregated needs two workers; attached: {names}")
    return NoRoute(
        f"the prompt of {ask.tokens} tokens may grow to {ask.total_tokens}, which no worker for "
        f"mode {mode} can hold: {names}",
        too_long=True,
    )


def _price(candidate: Candidate) -> tuple[float, float, str, str]:
    return candidate.price, candidate.itl_s, candidate.prefill, candidate.decode


def name_of(candidate: Candidate) -> str:
    if candidate.is_split:
        return f"disaggregated over {candidate.prefill} to {candidate.decode}"
    return f"mixed on {candidate.prefill}"


def describe(ask: Ask, c: Candidate) -> str:
    """One way in one line."""
    text = (
        f"{name_of(c)}: {ask.tokens} prompt tokens, first token expected in {_time(c.ttft_s)} "
        f"({_time(c.queue_s)} of it in the queue), then one every {_time(c.itl_s)}"
    )
    if c.is_split:
        text += f", {_time(c.transfer_s)} to move the KV"
    return text


def compare(chosen: Candidate, other: Candidate) -> str:
    """Why not the other way."""
    text = (
        f"{name_of(other)} would have its first token in {_time(other.ttft_s)}, then one every "
        f"{_time(other.itl_s)}"
    )
    if other.loss - chosen.loss >= 0.005:
        return f"{text}, and break {other.loss - chosen.loss:.2f} promises more"
    if other.price < chosen.price:
        return f"{text}, which is not enough better to keep two workers busy"
    if other.gpu_s > 1.05 * chosen.gpu_s:
        return f"{text}, and cost {other.gpu_s / chosen.gpu_s:.1f} times as much computing"
    if other.price - chosen.price >= ROLE / 2:
        return f"{text}, on a worker whose role is another"
    return f"{text}, and keep two workers busy" if other.is_split else text


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
