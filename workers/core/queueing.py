"""The sequences that wait for a seat, in the order of their turns.

No step looks at any but the first. One that ends while it waits stays in the heap until it comes to
the top.
"""

import heapq
from collections.abc import Iterator

from workers.core.request import Phase, Sequence


class Queue:
    """``num_seqs`` and ``num_tokens`` count what waits to be computed here; the KV of those with a
    handle is computed elsewhere."""

    def __init__(self) -> None:
        self.num_seqs, self.num_tokens = 0, 0
        self._heap: list[tuple[int, float, int, Sequence]] = []

    def push(self, seq: Sequence, order: float) -> None:
        """Queue a sequence: by priority, then by ``order``, then as they were submitted."""
        heapq.heappush(self._heap, (seq.request.priority, order, seq.rank[-1], seq))
        self.num_seqs += 1
        self.num_tokens += _to_compute(seq)

    def first(self) -> Sequence | None:
        while self._heap:
            seq = self._heap[0][3]
            if seq.phase is Phase.WAITING:
                return seq
            heapq.heappop(self._heap)  # ended while it waited
        return None

    def pop(self) -> None:
        """Take the first out. It must be there."""
        self.forget(heapq.heappop(self._heap)[3])

    def forget(self, seq: Sequence) -> None:
        """It waits no longer; its place is given up when it is the first."""
        self.num_seqs -= 1
        self.num_tokens -= _to_compute(seq)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return (entry[3] for entry in self._heap if entry[3].phase is Phase.WAITING)


def _to_compute(seq: Sequence) -> int:
    return seq.num_tokens if seq.handle is None else 0
