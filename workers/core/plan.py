"""What the scheduler asks the executor to do in one step, and what it costs."""

from dataclasses import dataclass
from typing import NamedTuple

from workers.core.request import Phase, Sequence


class Chunk(NamedTuple):
    """Compute tokens [start, start + length) of one sequence; a decode is a chunk of one."""

    seq: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last known token, so that a next one is drawn."""
        return self.start + self.length == self.seq.num_tokens

    @property
    def is_decode(self) -> bool:
        return self.seq.phase is Phase.DECODE


class BatchShape(NamedTuple):
    """All that a latency model may look at (DESIGN section 4: p, q, n, k)."""

    prefill_tokens: int
    prefill_context: int  # sum of chunk tokens * context, for the attention term
    decode_seqs: int
    decode_context: int  # sum of decode contexts


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decodes first, then prompt chunks: attention backends rely on the order."""

    decodes: tuple[Sequence, ...] = ()
    prefills: tuple[Chunk, ...] = ()
    fetches: tuple[Sequence, ...] = ()  # pages are reserved; bring their KV here
    preempted: tuple[Sequence, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills or self.fetches)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All that is computed, in the order of the batch. Ask before the step is committed."""
        return (*(Chunk(seq, seq.num_computed, 1) for seq in self.decodes), *self.prefills)

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            prefill_tokens=sum(c.length for c in self.prefills),
            prefill_context=sum(c.length * (c.start + c.length) for c in self.prefills),
            decode_seqs=len(self.decodes),
            decode_context=sum(seq.num_computed for seq in self.decodes),
        )


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of one of a plan's fetches, or of an early one."""

    was_early: bool
    failure: str | None  # why its pages are not here
    token: int | None  # that follows, when it came with an early one's pages
    num_bytes: int
    took_s: float  # of an early one, since its source had computed all of it
