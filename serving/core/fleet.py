"""The workers as one gateway knows them: what they reported last, and what it sent them since.

Reports are late, so a burst between two of them would all go to one worker without the second part.
A request sees a few workers of each role: of those drawn by lot (all of them in a small fleet) the
ones with the least to do at a glance, and those that hold the beginning of its prompt. So routing
costs the same at any size.
"""

import random
from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

from serving.core.predict import FORGIVEN, MIN_S, Ask, Demand, Queued, ReplicaView, queued
from workers.core.output import Load
from workers.core.pace import Pace

SETTLE_S = 0.05  # a report this soon after a submission may have crossed it on the way
DRAWN = 12  # workers of each role
SEEN = 4  # of them; what becomes of the request there is predicted
HOLDERS = 2  # of the beginning of a prompt
FIRST_OUTPUT = 128.0  # tokens of an answer, until some have been seen
OUTPUT_GAIN = 0.02
DEMAND_S = 10.0  # over which it is counted what prompts come
MIN_SEEN_S = 1.0


@dataclass(frozen=True, slots=True)
class _Sent:
    """One submission, with the load that the worker had reported at that time."""

    tokens: int
    load: Load
    at: float


class _Coming(NamedTuple):
    """A stream that will run here."""

    tokens: int
    itl_s: float  # promised
    at: float  # expected, when it is prefilled elsewhere


@dataclass(slots=True, eq=False)
class _Seat:
    """One worker. What is sent is kept until it is answered; ``sent`` until a report covers it."""

    id: str
    role: str
    capacity: int
    page_size: int
    load: Load
    pace: Pace = field(default_factory=Pace)
    sent: dict[str, _Sent] = field(default_factory=dict)
    queue: list[Queued] = field(default_factory=list)
    coming: dict[str, _Coming] = field(default_factory=dict)
    is_leaving: bool = False  # takes nothing new
    view: ReplicaView | None = None  # None: something has changed

    def glance(self, ask: Ask) -> float:
        """How much of what the request is promised is used up by what is to do here, about. It
        knows nothing that a step without events changes."""
        load, c = self.load, self.pace.coefficients
        tokens = load.queued_tokens
        if self.sent:
            tokens += sum([s.tokens for s in self.sent.values()])
        streams = load.decode_seqs + len(self.coming)
        held = (load.num_pages - load.free_pages) * self.page_size
        prompts_s, step_s = tokens * (c[1] + c[5]), c[0] + streams * (c[3] + c[5]) + held * c[4]
        return prompts_s / max(MIN_S, ask.slo.ttft_s) + step_s / max(MIN_S, ask.slo.itl_s)

    def look(self, now: float) -> ReplicaView:
        if self.sent and self._is_covered(now):
            self.view = None
        if self.view is None:
            self.view = self._view()
        return self.view

    def _is_covered(self, now: float) -> bool:
        """Whether some of what was sent shows in what has been reported; it is forgotten."""
        load = self.load
        covered = [
            key
            for key, s in self.sent.items()
            if s.load is not load and now - s.at >= SETTLE_S and s.load != load
        ]
        for key in covered:
            del self.sent[key]
        return bool(covered)

    def _view(self) -> ReplicaView:
        load, queue, promised = self.load, tuple(self.queue), self.load.promised_itl_s
        tokens = sum([s.tokens for s in self.sent.values()])
        coming_tokens, arriving = 0, tuple[float, ...]()
        if self.coming:
            coming_tokens = sum([c.tokens for c in self.coming.values()])
            here = {entry.key for entry in queue}
            arriving = tuple([c.at for key, c in self.coming.items() if key not in here])
            tightest = min([c.itl_s for c in self.coming.values()])
            promised = min(promised, tightest) if promised else tightest
        return ReplicaView(
            self.id,
            self.role,
            self.capacity,
            load.queued_tokens + tokens,
            load.decode_seqs,
            load.waiting_seqs + len(self.sent),
            load.context_tokens,
            len(self.coming),
            coming_tokens,
            arriving,
            load.free_pages * self.page_size - tokens,
            promised,
            queue,
            self.pace,
        )


class Fleet:
    """``rng`` draws the workers that are glanced at when they are many; ``sees_all`` of them every
    request sees, at its price."""

    def __init__(self, rng: random.Random | None = None, sees_all: bool = False) -> None:
        self._rng, self._sees_all = rng or random.Random(0), sees_all
        self._seats: dict[str, _Seat] = {}
        self._open: list[_Seat] = []  # take something new; all when nobody does
        self._by_role: dict[str, list[_Seat]] = {}  # of these
        self._at: dict[str, set[str]] = {}  # request -> workers that have something of it
        self.output_tokens = FIRST_OUTPUT  # of recent answers, their mean
        self.brief = 0.5  # part of them that had at most FORGIVEN tokens
        self._work, self._prompt_s, self._work_at = 0.0, 0.0, 0.0
        self._since: float | None = None  # the first prompt
        self.num_waiting = self.num_prefilling = 0  # sequences, as last reported

    # ------------------------------------------------------------------ workers

    def attach(
        self,
        id: str,
        role: str,
        capacity: int,
        page_size: int,
        load: Load,
        pace: Pace | None = None,
    ) -> None:
        self._seats[id] = _Seat(id, role, capacity, page_size, load, pace or Pace())
        self._count(load, 1)
        self._sort()

    def detach(self, id: str) -> None:
        seat = self._seats.pop(id, None)
        if seat is not None:
            self._count(seat.load, -1)
            self._sort()

    def heard(self, id: str, load: Load, pace: Pace | None = None, role: str = "") -> None:
        """A worker has reported."""
        seat = self._seats[id]
        self._count(seat.load, -1)
        self._count(load, 1)
        seat.load, seat.view = load, None
        if pace is not None:
            seat.pace = pace
        if role and role != seat.role:
            self.stand(id, role)

    def stand(self, id: str, role: str, is_leaving: bool = False) -> None:
        """What the worker wants to do from now on; one that is leaving takes nothing new."""
        seat = self._seats[id]
        seat.role, seat.is_leaving, seat.view = role, is_leaving, None
        self._sort()

    def __iter__(self) -> Iterator[str]:
        return iter(self._seats)

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, id: str) -> bool:
        return id in self._seats

    def load(self, id: str) -> Load:
        return self._seats[id].load

    def stance(self, id: str) -> tuple[str, bool]:
        """Its role, and whether it is leaving."""
        seat = self._seats[id]
        return seat.role, seat.is_leaving

    @property
    def step_s(self) -> float:
        """The longest of the workers' last steps."""
        return max((seat.load.step_s for seat in self._seats.values()), default=0.0)

    def capacity(self, id: str) -> int:
        return self._seats[id].capacity

    def _count(self, load: Load, sign: int) -> None:
        self.num_waiting += sign * load.waiting_seqs
        self.num_prefilling += sign * (load.running_seqs - load.decode_seqs)

    def _sort(self) -> None:
        self._by_role = {}
        everybody = list(self._seats.values())
        self._open = [seat for seat in everybody if not seat.is_leaving] or everybody
        for seat in self._open:
            self._by_role.setdefault(seat.role, []).append(seat)

    # ------------------------------------------------------------------ looking

    def look(self, id: str, now: float) -> ReplicaView:
        return self._seats[id].look(now)

    @property
    def names(self) -> list[str]:
        """Of who takes new work; of those that are leaving only when nobody else is there."""
        return [seat.id for seat in self._open]

    def everybody(self, now: float) -> list[ReplicaView]:
        """Them."""
        return [seat.look(now) for seat in self._open]

    def some(self, ask: Ask, now: float, avoid: Collection[str] = ()) -> list[ReplicaView]:
        """Those that a request chooses from."""
        return [self._seats[name].look(now) for name in self.draw(ask, avoid)]

    def draw(self, ask: Ask, avoid: Collection[str] = ()) -> list[str]:
        """Their names."""
        if self._sees_all:
            return self.names
        names: dict[str, None] = {}
        for group in self._by_role.values():
            names.update(dict.fromkeys(seat.id for seat in self._least_busy(group, ask, avoid)))
        known = [id for id in ask.cached if id in self._seats]
        best = sorted(known, key=lambda id: (-ask.cached[id], id))[:HOLDERS]
        names.update(dict.fromkeys(id for id in best if not self._seats[id].is_leaving))
        return list(names) or self.names

    def _least_busy(
        self, group: Sequence[_Seat], ask: Ask, avoid: Collection[str]
    ) -> Sequence[_Seat]:
        """Of those who may take the request, some that have little to do."""
        if len(group) <= SEEN:
            return group
        drawn = group if len(group) <= DRAWN else self._draw(group)
        fit = [s for s in drawn if s.capacity >= ask.total_tokens and s.id not in avoid]
        if not fit:
            fit = [s for s in group if s.capacity >= ask.tokens] or list(group)
        return fit if len(fit) <= SEEN else sorted(fit, key=lambda seat: seat.glance(ask))[:SEEN]

    def _draw(self, group: Sequence[_Seat]) -> Sequence[_Seat]:
        """About so many: who is drawn twice counts once."""
        size, random = len(group), self._rng.random
        return list(dict.fromkeys([group[int(random() * size)] for _ in range(DRAWN)]))

    # ------------------------------------------------------------------ requests

    def sent(
        self,
        worker: str,
        key: str,
        ask: Ask,
        now: float,
        *,
        decodes_at: str,
        first_s: float = 0.0,
    ) -> None:
        """A prompt goes to ``worker``, its stream to ``decodes_at`` afterwards: ``first_s`` from
        now, it is expected."""
        seat = self._seats[worker]
        entry = queued(ask, seat.look(now), now, key)
        insort(seat.queue, entry)
        self._arrived(entry.work_s, now)
        seat.sent[key] = _Sent(ask.tokens, seat.load, now)
        seat.view = None
        self._at.setdefault(key, set()).add(worker)
        self.expect(decodes_at, key, ask, now + first_s)

    def expect(self, worker: str, key: str, ask: Ask, at: float) -> None:
        """A stream will go on there from then on."""
        seat = self._seats.get(worker)
        if seat is not None:
            seat.coming[key] = _Coming(ask.tokens, ask.slo.itl_s, at)
            seat.view = None
            self._at.setdefault(key, set()).add(worker)

    def answered(self, worker: str, key: str) -> None:
        """The worker has made a token of it: what it reports contains it. Idempotent."""
        seat = self._seats.get(worker)
        places = self._at.get(key)
        if seat is None or places is None or worker not in places:
            return
        self._clear(seat, key)
        places.discard(worker)
        if not places:
            del self._at[key]

    def forget(self, key: str) -> None:
        """It is over, or starts again elsewhere. Idempotent."""
        for worker in self._at.pop(key, ()):
            seat = self._seats.get(worker)
            if seat is not None:
                self._clear(seat, key)

    def demand(self, now: float) -> Demand:
        """The prompts of the last seconds."""
        if self._since is None:
            return Demand(len(self._open))
        seen = 1.0 - exp((self._since - now - MIN_SEEN_S) / DEMAND_S)  # of the time that counts
        work = self._work * exp((self._work_at - now) / DEMAND_S) / seen
        return Demand(len(self._open), work, self._prompt_s)

    def _arrived(self, work_s: float, now: float) -> None:
        self._work = self._work * exp((self._work_at - now) / DEMAND_S) + work_s / DEMAND_S
        self._work_at = now
        gain = OUTPUT_GAIN
        if self._since is None:
            self._since, gain = now, 1.0
        self._prompt_s += gain * (work_s - self._prompt_s)

    def finished(self, output_tokens: int) -> None:
        """An answer had so many tokens."""
        self.output_tokens += OUTPUT_GAIN * (output_tokens - self.output_tokens)
        self.brief += OUTPUT_GAIN * ((output_tokens <= FORGIVEN) - self.brief)

    def _clear(self, seat: _Seat, key: str) -> None:
        seat.sent.pop(key, None)
        seat.coming.pop(key, None)
        for i, entry in enumerate(seat.queue):
            if entry.key == key:
                del seat.queue[i]
                break
        seat.view = None
