"""What the streams of one worker have received, counted without a look at each in every step.

A step of decodes brings every stream of the batch one token, all at the same instant. As long as
the batch stays as it is, one counter says how far all of them are, and one gap holds for them all;
only those that join or leave are looked at. The tokens themselves stay where they were made until
somebody asks (``Call.output``).
"""

from dataclasses import dataclass, field
from math import inf

from bench.sim.outcome import Gaps, Outcome
from workers.core.request import Request, Sequence

Batch = tuple[Sequence, ...]


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way, and the workers that may hold something of it."""

    request: Request
    outcome: Outcome
    late_s: float  # a gap longer than this one counts as late
    output: list[int] = field(default_factory=list)  # what the client has, but for running streams
    worker: str = ""  # whose tokens count now
    seq: Sequence | None = None  # and the sequence there that makes them
    decode: str = ""  # where it goes after a hand-off
    target: str = ""  # where it has been told to move to
    last_at: float = 0.0
    num_late: int = 0
    is_answered: bool = False
    touched: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    steps_before: int = 0  # as it joined the streams of its worker: what these had seen by then
    late_before: int = 0
    names: tuple[int, ...] = ()  # of its prompt's blocks, where prompts share some

    def take(self, num_tokens: int, at: float) -> None:
        """The client gets the next tokens that the sequence has made, the last of them now."""
        assert self.seq is not None, "tokens come from a sequence"
        start = len(self.output)
        self.output += self.seq.output[start : start + num_tokens]
        self.last_at = at


class Streams:
    """The calls that a worker sends a token with every step that decodes."""

    def __init__(self, gaps: Gaps) -> None:
        self._gaps = gaps
        self._batch: Batch = ()
        self._calls: dict[Sequence, Call] = {}
        self._num_steps = 0
        self._last_at = 0.0
        self._num_late = 0  # steps whose gap was late for every call here
        self._strictest, self._loosest = inf, 0.0  # of what they call late

    def step(self, batch: Batch, now: float, calls: dict[str, Call]) -> list[Call]:
        """A token for each of ``batch`` has arrived. Returns the calls that join by it; sequences
        that no call waits for any more are passed over."""
        joining: list[Call] = []
        if batch != self._batch:
            joining = self._change(batch, calls)
        if self._calls:
            gap = now - self._last_at
            self._gaps.add(gap, len(self._calls))
            if gap > self._strictest:
                self._count_late(gap)
        self._num_steps += 1
        self._last_at = now
        for call in joining:
            self._join(call, now)
        return joining

    def leave(self, call: Call) -> None:
        """No more of its tokens will come from here, or none that count. Idempotent."""
        if call.seq is not None and self._calls.pop(call.seq, None) is not None:
            call.num_late += self._num_late - call.late_before
            call.take(self._num_steps - call.steps_before, self._last_at)

    def _change(self, batch: Batch, calls: dict[str, Call]) -> list[Call]:
        """Let those go that are not in the batch; who is new in it?"""
        now_in, before = dict.fromkeys(batch), dict.fromkeys(self._batch)
        for seq in self._batch:
            if seq not in now_in and seq in self._calls:
                self.leave(self._calls[seq])
        self._batch = batch
        new = (calls.get(seq.id) for seq in batch if seq not in before)
        joining = [call for call in new if call is not None and call.seq in now_in]
        if not self._calls:
            self._strictest, self._loosest = inf, 0.0
        return joining

    def _join(self, call: Call, now: float) -> None:
        """With the first token after a pause, whose gap is its own."""
        assert call.seq is not None, "a call that joins has a sequence"
        if call.output:
            gap = now - call.last_at
            self._gaps.add(gap)
            call.num_late += gap > call.late_s
        else:
            call.outcome.first_at = now
        call.take(1, now)
        call.steps_before, call.late_before = self._num_steps, self._num_late
        self._calls[call.seq] = call
        self._strictest = min(self._strictest, call.late_s)
        self._loosest = max(self._loosest, call.late_s)

    def _count_late(self, gap: float) -> None:
        if gap > self._loosest:
            self._num_late += 1
            return
        for call in self._calls.values():
            call.num_late += gap > call.late_s
