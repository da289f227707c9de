"""The sequences that decode, in the order of their turns, and what must be known of all of them:
how much context they have, and how soon the most exacting of them was promised its next token.
"""

from collections.abc import Iterator
from itertools import islice

from workers.core.request import Sequence


class Decodes:
    def __init__(self) -> None:
        self.context = 0  # tokens, of all
        self._seqs: dict[Sequence, None] = {}
        self._promises: dict[float, int] = {}  # gap promised -> sequences

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def join(self, seq: Sequence) -> None:
        self._seqs[seq] = None
        self.context += seq.num_computed
        promise = seq.request.slo.itl_s
        self._promises[promise] = self._promises.get(promise, 0) + 1

    def leave(self, seq: Sequence) -> None:
        del self._seqs[seq]
        self.context -= seq.num_computed
        promise = seq.request.slo.itl_s
        self._promises[promise] -= 1
        if not self._promises[promise]:
            del self._promises[promise]

    def tightest_s(self, default: float) -> float:
        """The shortest gap promised; the default when nobody decodes."""
        return min(self._promises, default=default)

    def take_turns(self, max_seqs: int) -> tuple[Sequence, ...]:
        """Those of this step; when not all fit, the ones that waited longest."""
        if len(self._seqs) <= max_seqs:
            return tuple(self._seqs)
        chosen = tuple(islice(self._seqs, max_seqs))
        for seq in chosen:
            del self._seqs[seq]
            self._seqs[seq] = None
        return chosen
