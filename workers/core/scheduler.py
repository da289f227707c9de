"""Which tokens of which sequences the next step computes, and who holds the pages for them.

The executor (the engine or the simulator) repeats: plan, execute, commit. Pages for a whole prompt
are taken when it is admitted, less those whose contents are already here, so only decodes grow;
when the pool is empty the least important, youngest sequence gives its pages back and is computed
again later (preemption by recompute). The oldest sequence always advances, hence no livelock.

Prompts take turns by urgency (``workers/core/budget.py``); the first in the queue competes with
those that are under way, and gets its seat and pages with its first chunk.

A decode costs a step only its token: everything rarer (a page border, the last token, a hand-off)
is counted down in ``Sequence.quiet``. No step looks at sequences that wait, but for the first.
"""

from collections.abc import Callable, Iterator
from itertools import count
from math import inf
from operator import attrgetter
from typing import NamedTuple

from workers.core.budget import Due, Room, deadline, room_for, urgency
from workers.core.decodes import Decodes
from workers.core.latency import LatencyModel
from workers.core.pages import PagePool
from workers.core.plan import BatchShape, Chunk, StepPlan
from workers.core.policy import POLICIES, Batch, Limits, Turn
from workers.core.prefix import PrefixCache
from workers.core.queueing import Queue
from workers.core.request import Phase, Sequence

by_rank = attrgetter("rank")


class DoesNotFit(Exception):
    """The sequence is longer than an empty pool holds: it would wait for ever."""


class Departure(NamedTuple):
    """A sequence whose last token here came with the committed step."""

    seq: Sequence
    finish_reason: str | None
    handed_off: list[int] | None = None  # pages that now belong to a lease


class Scheduler:
    """Sequences from submission to their end; pure, and not thread-safe."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        *,
        model: str = "",
        prefix_caching: bool = True,
        latency: LatencyModel | None = None,
    ) -> None:
        self.limits, self.pool = limits, pool
        self.latency = latency or LatencyModel()
        self.num_preemptions = 0
        self._prefixes = PrefixCache(pool, model, prefix_caching)
        self._by_id: dict[str, Sequence] = {}
        self._decodes = Decodes()
        self._last_room = room_for(self.latency, BatchShape(0, 0, 0, 0), inf)
        self._prefills: list[Sequence] = []  # in no particular order
        self._due: list[Sequence] = []  # decodes whose next token needs a page, and ended ones
        self._queue = Queue()
        self._fetching: dict[str, Sequence] = {}  # also aborted ones whose pages still fill
        self._order = count()

    # ------------------------------------------------------------------ in and out

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence. Raises DoesNotFit, or ValueError for an id that is in use."""
        if seq.id in self._by_id or seq.id in self._fetching:
            raise ValueError(f"request id {seq.id!r} is in use")
        if seq.handle is not None and not 0 < seq.handle.num_tokens < seq.num_tokens:
            raise ValueError(f"{seq.handle.num_tokens=} is not within {seq.num_tokens=}")
        if seq.num_tokens > self.pool.max_tokens:
            raise DoesNotFit(
                f"{seq.num_tokens} tokens do not fit the KV pool of {self.pool.max_tokens} tokens "
                f"({self.pool.num_pages} pages of {self.pool.page_size})"
            )
        request = seq.request
        # The pool is the last bound on a context; the KV of the last token is never needed.
        seq.max_output = min(seq.max_output, self.pool.max_tokens - len(request.prompt) + 1)
        self._enroll(seq)
        self._enqueue(seq)

    def reserve(self, seq: Sequence) -> bool:
        """Take pages at once for an early sequence, to be fetched. False when room is short: those
        that wait come first, and each decode must be able to grow."""
        if seq.id in self._by_id or seq.id in self._fetching or self._queue.num_seqs:
            return False
        if self._num_running + len(self._fetching) >= self.limits.max_seqs:
            return False
        cached = self._prefixes.find(seq)
        spare = self.pool.num_free - self.pool.pages_for(seq.num_tokens)
        if spare <= len(self._decodes) or not self.pool.fits(seq, seq.num_tokens, cached):
            return False
        self._enroll(seq)
        self._fetching[seq.id] = seq
        self._settle(seq, Phase.FETCHING, cached)
        return True

    def _enroll(self, seq: Sequence) -> None:
        seq.rank = (seq.request.priority, seq.request.arrived_at, next(self._order))
        self._by_id[seq.id] = seq

    def confirm(self, request_id: str, token: int, hand_off: bool) -> Sequence | None:
        """The token is known that an early sequence waited for: it goes on as soon as its pages are
        here. None when there is no such sequence any more."""
        seq = self._by_id.get(request_id)
        if seq is None or not seq.is_early:
            return None
        seq.is_early, seq.hand_off = False, hand_off
        seq.output.append(token)
        if seq.phase is Phase.LANDED:
            del self._fetching[request_id]
            self._join_decodes(seq)
        return seq

    def abort(self, request_id: str) -> Sequence | None:
        """End a sequence in any phase; None when there is none. Pages that a transfer is
        filling stay reserved until fetch_ended."""
        seq = self._by_id.get(request_id)
        if seq is not None:
            self._leave(seq, Phase.DONE)
        return seq

    def hand_off(self, request_id: str) -> bool:
        """Let a running sequence leave with its pages after its next token."""
        seq = self._by_id.get(request_id)
        if seq is not None:
            seq.hand_off, seq.quiet = True, 1
        return seq is not None

    def __getitem__(self, request_id: str) -> Sequence:
        return self._by_id[request_id]

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def decodes(self) -> list[Sequence]:
        return list(self._decodes)

    @property
    def prefills(self) -> list[Sequence]:
        return list(self._prefills)

    @property
    def num_decodes(self) -> int:
        return len(self._decodes)

    @property
    def decode_context(self) -> int:
        """Tokens of context of all running decodes."""
        return self._decodes.context

    @property
    def num_waiting(self) -> int:
        return self._queue.num_seqs

    @property
    def waiting_tokens(self) -> int:
        """Of the sequences that wait to be computed here."""
        return self._queue.num_tokens

    @property
    def promised_itl_s(self) -> float:
        """The tightest gap promised to a running decode; 0 when there is none."""
        return self._decodes.tightest_s(default=0.0)

    def waiting(self) -> Iterator[Sequence]:
        """Sequences that wait, in no particular order."""
        return iter(self._queue)

    def owned(self) -> dict[str, int]:
        """Pages of each sequence that holds some, aborted fetches included."""
        everyone = {**self._fetching, **self._by_id}
        return {seq.id: len(seq.pages) for seq in everyone.values() if seq.pages}

    # ------------------------------------------------------------------ one step

    def plan(self, now: float = 0.0) -> StepPlan:
        """The next step. Empty when nothing can run."""
        preempted = self._yield_to_priority()
        batch = Batch(len(self._decodes), len(self._prefills), self._queue.num_seqs)
        for turn in POLICIES[self.limits.policy](self.limits, batch):
            plan = self._fill(turn, preempted, now)
            if plan:
                return plan
        return StepPlan(preempted=tuple(preempted))

    def commit(self, plan: StepPlan, sampled: dict[str, int]) -> list[Departure]:
        """Apply an executed step: each sequence in ``sampled`` has one token more. Returns those
        that left with it. What was aborted while the step ran is passed over."""
        departures: list[Departure] = []
        decode, advanced = Phase.DECODE, 0
        for seq in plan.decodes:
            if seq.phase is not decode:
                continue
            token = sampled[seq.id]
            seq.output.append(token)
            seq.num_computed += 1
            seq.quiet -= 1
            advanced += 1
            if seq.quiet <= 0 or token in seq.stop_ids:
                self._turn_of_events(seq, departures)
        self._decodes.context += advanced
        for seq, start, length in plan.prefills:
            if seq.phase is not Phase.PREFILL:
                continue
            samples = start + length == seq.num_tokens
            seq.num_computed = start + length
            self._prefixes.publish(seq)
            if samples:
                seq.output.append(sampled[seq.id])
                self._turn_of_events(seq, departures)
        return departures

    def num_quiet(self, plan: StepPlan) -> int:
        """How many steps from here, ``plan`` the first of them, can only bring the same decodes one
        token each, as long as nobody comes, goes or asks for anything; the event that ends the
        quiet comes with the last of them."""
        everybody = len(plan.decodes) == len(self._decodes) > 0
        if not everybody or self._prefills or self._queue.num_seqs or self._fetching:
            return 1
        return (
            1
            if any(seq.stop_ids for seq in plan.decodes)
            else min(seq.quiet for seq in plan.decodes)
        )

    def commit_quiet(self, plan: StepPlan, sampled: dict[str, list[int]], num_steps: int) -> None:
        """As so many times ``plan`` and ``commit``; there are more than that within the quiet."""
        for seq in plan.decodes:
            assert seq.quiet > num_steps, f"{seq.id}: {seq.quiet} quiet steps, not {num_steps}"
            seq.output += sampled[seq.id]
            seq.num_computed += num_steps
            seq.quiet -= num_steps
        self._decodes.context += num_steps * len(plan.decodes)

    def fetch_ended(self, seq: Sequence, landed: bool) -> bool:
        """A transfer into the reserved pages is over. Landed: go on from the tokens it brought.
        Failed: compute what is not here; an early one ends, for its source still computes it.
        False when the sequence has ended, or was aborted meanwhile."""
        if seq.is_early and landed and seq.phase is Phase.FETCHING:
            self._land(seq)
            seq.move_to(Phase.LANDED)  # among those that fetch: it keeps its seat
            return True
        del self._fetching[seq.id]
        if seq.phase is not Phase.DONE and seq.is_early:
            self._leave(seq, Phase.DONE)
        if seq.phase is Phase.DONE:
            self.pool.release(seq)
            return False
        assert seq.handle is not None, "only a sequence with a handle is fetched"
        if not landed:
            self._back_to_queue(seq)
            return True
        self._land(seq)
        if seq.num_pending == 1:
            self._join_decodes(seq)
        else:
            self._join_prefills(seq)
        return True

    def _land(self, seq: Sequence) -> None:
        assert seq.handle is not None, "only a sequence with a handle is fetched"
        seq.num_computed, seq.handle = seq.handle.num_tokens, None
        self._prefixes.publish(seq)

    # ------------------------------------------------------------------ filling a step

    def _fill(self, turn: Turn, preempted: list[Sequence], now: float) -> StepPlan:
        num_preempted = len(preempted)
        decodes: tuple[Sequence, ...] = ()
        if turn.max_decodes:
            self._make_room(preempted)
            decodes = self._decodes.take_turns(turn.max_decodes)
        prefills: list[Chunk] = []
        fetches: list[Sequence] = []
        if self._prefills or self._queue.num_seqs:
            may_admit = turn.admit and len(preempted) == num_preempted
            head = self._next_head(fetches) if may_admit else None
            self._share(turn, self._room(len(decodes)), now, head, prefills, fetches)
        return StepPlan(decodes, tuple(prefills), tuple(fetches), tuple(preempted))

    def _share(
        self,
        turn: Turn,
        room: Room,
        now: float,
        head: Sequence | None,
        chunks: list[Chunk],
        fetches: list[Sequence],
    ) -> None:
        """Cut chunks, the most urgent prompt first. ``head`` of the queue competes with those that
        are under way, and after it the next one does."""
        left = turn.max_prefill_tokens
        key = self._urgency(turn, room, head, now)
        pending = sorted(self._prefills, key=key, reverse=True)
        while left > 0 and (pending or head):
            if head is not None and (not pending or key(head) < key(pending[-1])):
                seq = head
            else:
                seq = pending.pop()
            length = self._cut(seq, turn, left, room, chunks)
            if length == 0:
                break
            left -= length
            if seq is head:
                self._seat(seq, Phase.PREFILL)
                self._prefills.append(seq)
                head = self._next_head(fetches)

    def _urgency(
        self, turn: Turn, room: Room, head: Sequence | None, now: float
    ) -> Callable[[Sequence], tuple[float, ...]]:
        """What to sort prompts by, the most urgent first."""
        if turn.tile == 0:
            return by_rank
        prompts = [self._as_due(seq) for seq in (*self._prefills, *([head] if head else []))]
        key = urgency(prompts, now, room.prompt_rate)
        return lambda seq: key(self._as_due(seq))

    def _as_due(self, seq: Sequence) -> Due:
        start = max(seq.num_computed, seq.num_cached)
        left_s = self.latency.prompt_s(start, seq.num_tokens)
        return Due(seq.request.priority, seq.deadline, left_s)

    def _room(self, num_decodes: int) -> Room:
        share = num_decodes / len(self._decodes) if num_decodes else 0.0
        shape = BatchShape(0, 0, num_decodes, int(share * self._decodes.context))
        self._last_room = room_for(self.latency, shape, self._decodes.tightest_s(default=inf))
        return self._last_room

    def _make_room(self, preempted: list[Sequence]) -> None:
        """A page for each decode at a page border, at the cost of the least important. One that was
        moved here may have brought it."""
        due, self._due = [seq for seq in self._due if self._lacks_page(seq)], []
        while len(due) > self.pool.num_free:
            victim = self._least_important()
            self._preempt(victim)
            preempted.append(victim)
            due = [seq for seq in due if self._lacks_page(seq)]
        for seq in due:
            self.pool.grow(seq, seq.num_tokens)

    def _lacks_page(self, seq: Sequence) -> bool:
        is_running = seq.phase is Phase.DECODE
        return is_running and self.pool.pages_for(seq.num_tokens) > len(seq.pages)

    def _cut(self, seq: Sequence, turn: Turn, left: int, room: Room, chunks: list[Chunk]) -> int:
        """Append the sequence's next chunk within ``left`` tokens; returns its length."""
        start = max(seq.num_computed, seq.num_cached)
        wanted = length = seq.num_tokens - start
        if turn.tile == 0:  # whole prompts; one that exceeds the budget runs alone
            if length > left and chunks:
                return 0
        else:
            length = min(length, left)
            if self.limits.online:
                length = room.longest(start, length)
            if length < wanted:
                length = length - length % turn.tile or length
        if length:
            chunks.append(Chunk(seq, start, length))
            room.take(start, length)
        return length

    def _next_head(self, fetches: list[Sequence]) -> Sequence | None:
        """The first in the queue, if there is a seat and room for it. Those whose KV is elsewhere
        take their seats on the way."""
        while self._num_running + len(self._fetching) < self.limits.max_seqs:
            seq = self._queue.first()
            if seq is None or not self.pool.fits(seq, seq.num_tokens, self._found(seq)):
                return None
            if seq.handle is None:
                return seq
            self._seat(seq, Phase.FETCHING)
            self._fetching[seq.id] = seq
            fetches.append(seq)
        return None

    def _found(self, seq: Sequence) -> list[int]:
        """Pages here that hold its first tokens; their number is noted on the sequence."""
        cached = self._prefixes.find(seq)
        seq.num_cached = len(cached) * self.pool.page_size
        return cached

    def _seat(self, seq: Sequence, phase: Phase) -> None:
        """Take the first in the queue into the batch, with all the pages of its tokens."""
        cached = self._prefixes.find(seq)
        self._queue.pop()
        self._settle(seq, phase, cached)

    def _settle(self, seq: Sequence, phase: Phase, cached: list[int]) -> None:
        seq.move_to(phase)
        self.pool.share(seq, cached)
        seq.num_published = len(cached)
        seq.num_computed = seq.num_cached = len(cached) * self.pool.page_size
        self.pool.grow(seq, seq.num_tokens)

    # ------------------------------------------------------------------ who runs

    @property
    def _num_running(self) -> int:
        return len(self._decodes) + len(self._prefills)

    def _turn_of_events(self, seq: Sequence, departures: list[Departure]) -> None:
        """What its newest token means for a sequence, beyond being one more token."""
        reason = seq.finish_reason
        if reason is not None:
            self._prefixes.publish(seq)
            self._leave(seq, Phase.DONE)
            departures.append(Departure(seq, reason))
        elif seq.hand_off:
            pages, seq.pages = seq.pages, []
            self._leave(seq, Phase.HANDED_OFF)
            departures.append(Departure(seq, None, pages))
        elif seq.phase is Phase.PREFILL:
            self._prefills.remove(seq)
            self._join_decodes(seq)
        else:
            self._prefixes.publish(seq)
            self._count_down(seq)

    def _join_decodes(self, seq: Sequence) -> None:
        seq.move_to(Phase.DECODE)
        self._decodes.join(seq)
        self._count_down(seq)

    def _join_prefills(self, seq: Sequence) -> None:
        seq.move_to(Phase.PREFILL)
        self._prefills.append(seq)

    def _count_down(self, seq: Sequence) -> None:
        """Steps until the sequence is at a page border or has all its tokens."""
        page_size = self.pool.page_size
        to_border = page_size - seq.num_computed % page_size
        seq.quiet = 1 if seq.hand_off else min(to_border, seq.max_output - len(seq.output))
        if to_border == page_size:
            self._due.append(seq)

    def _yield_to_priority(self) -> list[Sequence]:
        """Preempt less important sequences for a more important one that waits in vain."""
        preempted: list[Sequence] = []
        head = self._queue.first()
        while head is not None and self._num_running and not self._has_room(head):
            worst = self._least_important()
            if worst.request.priority <= head.request.priority or not self._would_fit(head):
                break
            self._preempt(worst)
            preempted.append(worst)
        return preempted

    def _has_room(self, seq: Sequence) -> bool:
        seats = self.limits.max_seqs - self._num_running - len(self._fetching)
        return seats > 0 and self.pool.fits(seq, seq.num_tokens, self._prefixes.find(seq))

    def _would_fit(self, head: Sequence) -> bool:
        """Whether giving up every less important sequence makes room for ``head``."""
        running = (*self._decodes, *self._prefills)
        less = (seq for seq in running if seq.request.priority > head.request.priority)
        pages = self.pool.num_free + sum(len(seq.pages) for seq in less)
        return pages >= self.pool.pages_for(head.num_tokens)

    def _least_important(self) -> Sequence:
        everybody: list[Sequence] = [*self._decodes, *self._prefills]
        return max(everybody, key=by_rank)

    def _preempt(self, seq: Sequence) -> None:
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._unseat(seq)
        self._back_to_queue(seq)

    def _back_to_queue(self, seq: Sequence) -> None:
        self.pool.release(seq)
        seq.move_to(Phase.WAITING)
        seq.num_computed = seq.num_cached = 0
        seq.handle = None  # the source has let go of its copy
        self._enqueue(seq)

    def _unseat(self, seq: Sequence) -> None:
        if seq.phase is Phase.DECODE:
            self._decodes.leave(seq)
        elif seq.phase is Phase.PREFILL:
            self._prefills.remove(seq)
        elif seq.phase is Phase.LANDED:
            del self._fetching[seq.id]

    def _leave(self, seq: Sequence, phase: Phase) -> None:
        if seq.phase is Phase.WAITING:
            self._queue.forget(seq)
        elif seq.phase is not Phase.FETCHING:
            self._unseat(seq)
            self.pool.release(seq)
        seq.move_to(phase)
        del self._by_id[seq.id]

    # ------------------------------------------------------------------ the queue

    def _enqueue(self, seq: Sequence) -> None:
        seq.deadline = self._deadline(seq)
        order = seq.deadline if self.limits.by_deadline else seq.request.arrived_at
        self._queue.push(seq, order)

    def _deadline(self, seq: Sequence) -> float:
        """When its next token is due; at once for a stream that was interrupted."""
        request = seq.request
        if seq.output:
            return request.arrived_at
        work_s = self.latency.prompt_s(0, seq.num_tokens) / self._last_room.prompt_rate
        return deadline(request.arrived_at, request.slo.ttft_s, work_s)
