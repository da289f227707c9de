"""Pages between simulated workers: the live lease ledgers, and time on a wire that is shared.

A worker sends one transfer at a time and receives one at a time; others queue. That is how pairs
behave live, and what equal shares of one network port cost on average.
"""

import random
from collections.abc import Callable

from bench.sim.clock import Clock
from bench.sim.faults import Faults
from bench.sim.worker import SimWorker
from kvtransfer.core.handle import KVHandle
from workers.core.request import Sequence


class SimLinks:
    """Reads ``workers`` by the address in a handle; a dead worker answers nobody."""

    def __init__(
        self, clock: Clock, workers: dict[str, SimWorker], faults: Faults, rng: random.Random
    ) -> None:
        self._clock, self._workers, self._faults, self._rng = clock, workers, faults, rng
        self._sending_until: dict[str, float] = {}
        self._receiving_until: dict[str, float] = {}
        self.num_transfers = self.num_failed = self.num_bytes = 0

    def fetch(
        self, target: SimWorker, seq: Sequence, skip: int, ended: Callable[[bool], None]
    ) -> None:
        handle = seq.handle
        assert handle is not None, "only a sequence with a handle is fetched"
        self.num_transfers += 1
        now, timeout_s = self._clock.now, target.spec.transfer_timeout_s
        num_bytes = max(0, handle.num_pages - skip) * handle.layout.page_bytes
        wire_s = target.spec.latency.transfer_s(num_bytes, f"{handle.source}>{target.id}")
        start = max(
            now,
            self._sending_until.get(handle.source, 0.0),
            self._receiving_until.get(target.id, 0.0),
        )
        end = start + wire_s
        if self._stalls() or end > now + timeout_s:
            self._clock.at(now + timeout_s, self._fail, ended)
            return
        self._sending_until[handle.source] = self._receiving_until[target.id] = end
        self._clock.at(start, self._send, handle, end, ended)
        self.num_bytes += num_bytes

    def _send(self, handle: KVHandle, end: float, ended: Callable[[bool], None]) -> None:
        """The wire is ours: the source pins its pages for as long as they are read."""
        source = self._workers.get(handle.source)
        pages = None
        if source is not None and not source.is_dead:
            pages = source.leases.begin_send(handle.request_id, self._clock.now)
        if source is None or pages is None:
            self._fail(ended)
            return
        self._clock.at(end, self._sent, source, handle.request_id, pages, ended)

    def _sent(
        self,
        source: SimWorker,
        request_id: str,
        pages: tuple[int, ...],
        ended: Callable[[bool], None],
    ) -> None:
        source.leases.end_send(request_id, pages, self._clock.now)
        if source.is_dead or self._fails():
            self._fail(ended)
        else:
            ended(True)

    def _fail(self, ended: Callable[[bool], None]) -> None:
        self.num_failed += 1
        ended(False)

    def renew(self, handle: KVHandle) -> None:
        source = self._workers.get(handle.source)
        if source is not None and not source.is_dead:
            source.leases.renew(handle.request_id, self._clock.now)

    def release(self, handle: KVHandle) -> None:
        """The note may take a while; a wake-up lets the source plan with the pages."""
        source = self._workers.get(handle.source)
        if source is not None and not source.is_dead:
            self._clock.after(self._faults.delay_s(self._rng), source.drop_lease, handle.request_id)

    def _stalls(self) -> bool:
        chance = self._faults.transfer_stalls
        return bool(chance) and self._rng.random() < chance

    def _fails(self) -> bool:
        chance = self._faults.transfer_fails
        return bool(chance) and self._rng.random() < chance
