"""Which tokens of which sequences the next step computes, and who holds the pages for them.

The executor (the engine or the simulator) repeats: plan, execute, commit. Between the two
nothing else changes a sequence. Pages for a whole prompt are taken when it is admitted, so only
decodes grow; when the pool is empty the least important, youngest sequence gives its pages back
and is computed again later (preemption by recompute). The oldest sequence always advances, hence
no livelock.
"""

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from workers.core.pages import PagePool
from workers.core.plan import Chunk, StepPlan
from workers.core.policy import POLICIES, Batch, Limits, Turn
from workers.core.request import Phase, Sequence


class DoesNotFit(Exception):
    """The sequence is longer than an empty pool holds: it would wait for ever."""


class Advance(NamedTuple):
    """What a committed step did to one sequence that sampled."""

    seq: Sequence
    finish_reason: str | None  # it has left; its pages are free
    handed_off: list[int] | None = None  # it has left; these pages are for a lease


class Scheduler:
    """Sequences from submission to their end; pure, and not thread-safe."""

    def __init__(self, limits: Limits, pool: PagePool) -> None:
        self.limits, self.pool = limits, pool
        self.running: list[Sequence] = []  # PREFILL and DECODE, most important first
        self.waiting_tokens = 0  # prompt tokens of the sequences that wait to be computed here
        self.num_preemptions = 0
        self._by_id: dict[str, Sequence] = {}
        self._waiting: list[tuple[int, float, int, Sequence]] = []  # heap; may hold ended ones
        self._num_waiting = 0
        self._rank: dict[str, tuple[int, float, int]] = {}
        self._fetching: dict[str, Sequence] = {}  # also aborted ones whose pages still fill
        self._last_step: dict[str, int] = {}  # of a decode; only kept while the budget is short
        self._order = count()
        self._step = 0

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
        self._by_id[seq.id] = seq
        self._rank[seq.id] = (seq.request.priority, seq.request.arrived_at, next(self._order))
        self._enqueue(seq)

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
            seq.hand_off = True
        return seq is not None

    def __getitem__(self, request_id: str) -> Sequence:
        return self._by_id[request_id]

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def owned(self) -> dict[str, int]:
        """Pages of each sequence that holds some, aborted fetches included."""
        everyone = {**self._fetching, **self._by_id}
        return {seq.id: len(seq.pages) for seq in everyone.values() if seq.pages}

    # ------------------------------------------------------------------ one step

    def plan(self) -> StepPlan:
        """The next step. Empty when nothing can run."""
        self._step += 1
        preempted = self._yield_to_priority()
        num_decodes = sum(seq.phase is Phase.DECODE for seq in self.running)
        batch = Batch(num_decodes, len(self.running) - num_decodes, self._num_waiting)
        for turn in POLICIES[self.limits.policy](self.limits, batch):
            plan = self._fill(turn, preempted)
            if plan:
                return plan
        return StepPlan(preempted=tuple(preempted))

    def commit(self, plan: StepPlan, sampled: dict[str, int]) -> list[Advance]:
        """Apply an executed step: one Advance for each sequence that got a token."""
        advances = []
        for seq, start, length in plan.chunks:
            if self._by_id.get(seq.id) is not seq:
                continue  # ended by the caller while the step ran
            samples = start + length == seq.num_tokens
            seq.num_computed = start + length
            if samples:
                seq.output.append(sampled[seq.id])
                advances.append(self._advance(seq))
        return advances

    def fetch_ended(self, seq: Sequence, landed: bool) -> bool:
        """A transfer into the reserved pages is over. Landed: go on from the tokens it brought.
        Failed: compute them all again. False when the sequence was aborted meanwhile."""
        del self._fetching[seq.id]
        if seq.phase is Phase.DONE:
            self.pool.release(seq)
            return False
        assert seq.handle is not None, "only a sequence with a handle is fetched"
        if landed:
            seq.num_computed, seq.handle = seq.handle.num_tokens, None
            seq.move_to(Phase.DECODE if seq.num_pending == 1 else Phase.PREFILL)
            self._join(seq)
        else:
            self.pool.release(seq)
            seq.handle = None
            seq.move_to(Phase.WAITING)
            self._enqueue(seq)
        return True

    # ------------------------------------------------------------------ filling a step

    def _fill(self, turn: Turn, preempted: list[Sequence]) -> StepPlan:
        chunks: dict[str, Chunk] = {}
        num_preempted = len(preempted)
        for seq in self._decodes(turn.max_decodes):
            if seq.phase is not Phase.DECODE:
                continue  # preempted for one before it
            if self._make_room(seq, preempted, chunks):
                chunks[seq.id] = Chunk(seq, seq.num_computed, 1)
        left = turn.max_prefill_tokens
        prefills: list[Chunk] = []
        for seq in self.running:
            if left > 0 and seq.phase is Phase.PREFILL:
                left -= self._cut(seq, turn, left, prefills)
        fetches: list[Sequence] = []
        if turn.admit and len(preempted) == num_preempted:
            fetches = self._admit(turn, left, prefills)
        return StepPlan((*chunks.values(), *prefills), tuple(fetches), tuple(preempted))

    def _decodes(self, max_decodes: int) -> list[Sequence]:
        """The decodes of this step; when not all fit the budget, those that waited longest."""
        if max_decodes == 0:
            return []
        decodes = [seq for seq in self.running if seq.phase is Phase.DECODE]
        if len(decodes) <= max_decodes:
            self._last_step.clear()
            return decodes
        decodes.sort(key=lambda seq: self._last_step.get(seq.id, 0))
        chosen = decodes[:max_decodes]
        self._last_step.update((seq.id, self._step) for seq in chosen)
        return chosen

    def _make_room(
        self, seq: Sequence, preempted: list[Sequence], chunks: dict[str, Chunk]
    ) -> bool:
        """Pages for one more token, at the cost of the least important; False: it was itself."""
        while not self.pool.fits(seq, seq.num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            chunks.pop(victim.id, None)
            if victim is seq:
                return False
        self.pool.grow(seq, seq.num_tokens)
        return True

    def _cut(self, seq: Sequence, turn: Turn, left: int, chunks: list[Chunk]) -> int:
        """Append the sequence's next chunk within ``left`` tokens; returns its length."""
        length = seq.num_pending
        if turn.tile == 0:  # whole prompts; one that exceeds the budget runs alone
            if length > left and chunks:
                return 0
        elif length > left:
            length = left - left % turn.tile or left
        chunks.append(Chunk(seq, seq.num_computed, length))
        return length

    def _admit(self, turn: Turn, left: int, chunks: list[Chunk]) -> list[Sequence]:
        fetches: list[Sequence] = []
        while len(self.running) + len(self._fetching) < self.limits.max_seqs:
            seq = self._head()
            if seq is None or not self.pool.fits(seq, seq.num_tokens):
                break
            if seq.handle is not None:
                self._dequeue(Phase.FETCHING)
                self._fetching[seq.id] = seq
                fetches.append(seq)
                continue
            length = self._cut(seq, turn, left, chunks) if left > 0 else 0
            if length == 0:
                break
            left -= length
            self._dequeue(Phase.PREFILL)
            self._join(seq)
        return fetches

    # ------------------------------------------------------------------ who runs

    def _advance(self, seq: Sequence) -> Advance:
        reason = seq.finish_reason
        if reason is None and seq.num_tokens > self.pool.max_tokens:
            reason = "length"  # the pool is the last bound on a context
        if reason is not None:
            self._leave(seq, Phase.DONE)
            return Advance(seq, reason)
        if seq.hand_off:
            pages = seq.pages
            seq.pages = []
            self._leave(seq, Phase.HANDED_OFF)
            return Advance(seq, None, pages)
        if seq.phase is Phase.PREFILL:
            seq.move_to(Phase.DECODE)
        return Advance(seq, None)

    def _yield_to_priority(self) -> list[Sequence]:
        """Preempt less important sequences for a more important one that waits in vain."""
        preempted: list[Sequence] = []
        head = self._head()
        while head is not None and self.running:
            worst = self.running[-1]
            if worst.request.priority <= head.request.priority or self._has_room(head):
                break
            if not self._would_fit(head):
                break
            self._preempt(worst)
            preempted.append(worst)
            head = self._head()
        return preempted

    def _has_room(self, seq: Sequence) -> bool:
        seats = self.limits.max_seqs - len(self.running) - len(self._fetching)
        return seats > 0 and self.pool.fits(seq, seq.num_tokens)

    def _would_fit(self, head: Sequence) -> bool:
        """Whether giving up every less important sequence makes room for ``head``."""
        less = [s for s in self.running if s.request.priority > head.request.priority]
        pages = self.pool.num_free + sum(len(s.pages) for s in less)
        return pages >= self.pool.pages_for(head.num_tokens)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        seq.move_to(Phase.WAITING)
        seq.num_computed, seq.handle = 0, None  # the source has let go of its copy
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(seq)

    def _join(self, seq: Sequence) -> None:
        """Keep ``running`` sorted by importance; nearly always an append."""
        rank, at = self._rank[seq.id], len(self.running)
        while at and self._rank[self.running[at - 1].id] > rank:
            at -= 1
        self.running.insert(at, seq)

    def _leave(self, seq: Sequence, phase: Phase) -> None:
        if seq.phase is Phase.WAITING:
            self._forget_waiting(seq)
        elif seq.phase in (Phase.PREFILL, Phase.DECODE):
            self.running.remove(seq)
            self.pool.release(seq)
        seq.move_to(phase)
        del self._by_id[seq.id], self._rank[seq.id]

    # ------------------------------------------------------------------ the queue

    def _enqueue(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (*self._rank[seq.id], seq))
        self._num_waiting += 1
        self.waiting_tokens += seq.num_pending if seq.handle is None else 0

    def _head(self) -> Sequence | None:
        while self._waiting:
            seq = self._waiting[0][3]
            if seq.phase is Phase.WAITING:
                return seq
            heapq.heappop(self._waiting)  # aborted while it waited
        return None

    def _dequeue(self, phase: Phase) -> None:
        seq = heapq.heappop(self._waiting)[3]
        self._forget_waiting(seq)
        seq.move_to(phase)
        self.pool.grow(seq, seq.num_tokens)

    def _forget_waiting(self, seq: Sequence) -> None:
        self._num_waiting -= 1
        self.waiting_tokens -= seq.num_pending if seq.handle is None else 0

    def waiting(self) -> Iterator[Sequence]:
        """Sequences that wait, in no particular order."""
        return (entry[3] for entry in self._waiting if entry[3].phase is Phase.WAITING)
