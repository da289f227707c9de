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


@dataclass(frozen=True, slots=True)
class BatchShape:
    """All that a latency model may look at (DESIGN section 4: p, q, n, k)."""

    prefill_tokens: int
    prefill_context: int  # sum of chunk tokens * context, for the attention term
    decode_seqs: int
    decode_context: int  # sum of decode contexts


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decodes first, then prompt chunks: attention backends rely on the order."""

    chunks: tuple[Chunk, ...] = ()
    fetches: tuple[Sequence, ...] = ()  # pages are reserved; bring their KV here
    preempted: tuple[Sequence, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chunks or self.fetches)

    @property
    def shape(self) -> BatchShape:
        decodes = [c for c in self.chunks if c.is_decode]
        prefills = [c for c in self.chunks if not c.is_decode]
        return BatchShape(
            prefill_tokens=sum(c.length for c in prefills),
            prefill_context=sum(c.length * (c.start + c.length) for c in prefills),
            decode_seqs=len(decodes),
            decode_context=sum(c.start for c in decodes),
        )
