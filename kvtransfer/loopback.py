"""Transport between workers that live in one process: a copy between two pools.

For tests, and for a single process that holds several engines. It keeps every promise of
``Transport``, with the same errors, and has no threads and no sockets.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.leases import Leases
from kvtransfer.transport import Landing, TransferError, check_room

Moment = Literal["before", "after"]
Fault = Callable[[Moment, KVHandle], None]  # may sleep or raise, before and after the copy


@dataclass(frozen=True, slots=True)
class Member:
    """One worker as the others see it."""

    pool: Tensor  # [page, layer, kv_head, 2, page_size, head_dim]
    layout: KVLayout
    incarnation: str
    leases: Leases


class LoopbackNetwork:
    """Who can be reached under which address."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._lock = threading.Lock()

    def join(self, address: str, member: Member) -> None:
        """A newcomer under a known address replaces its predecessor, as a restarted worker does."""
        with self._lock:
            self._members[address] = member

    def leave(self, address: str, member: Member) -> None:
        with self._lock:
            if self._members.get(address) is member:
                del self._members[address]

    def find(self, handle: KVHandle) -> Member:
        """The holder of the lease; TransferError when it is gone or was restarted."""
        with self._lock:
            member = self._members.get(handle.source)
        if member is None:
            raise TransferError(f"nobody at {handle.source}")
        if member.incarnation != handle.incarnation:
            raise TransferError(f"{handle.source} was restarted since it granted the lease")
        return member


class LoopbackTransport:
    def __init__(
        self,
        network: LoopbackNetwork,
        address: str,
        pool: Tensor,
        layout: KVLayout,
        incarnation: str,
        leases: Leases,
        *,
        fault: Fault | None = None,
    ) -> None:
        self.fault = fault
        self._network = network
        self._address = address
        self._self = Member(pool, layout, incarnation, leases)
        self._closed = False
        network.join(address, self._self)

    def fetch(
        self, handle: KVHandle, pages: Sequence[int], timeout_s: float, skip: int = 0
    ) -> None:
        deadline = time.monotonic() + timeout_s
        check_room(handle, pages, skip)
        source = self._source(handle)
        self._meet_fault("before", handle, deadline)
        theirs = source.leases.begin_send(handle.request_id)
        if theirs is None:
            raise TransferError(f"{handle.source} holds no lease for {handle.request_id}")
        try:
            if len(theirs) - skip != len(pages):
                raise TransferError(f"{len(theirs)} pages leased, {handle.num_pages} on offer")
            with torch.inference_mode():  # a pool may be an inference tensor
                records = source.pool[list(theirs[skip:])]
                self._self.pool[list(pages)] = records.to(self._self.pool.device)
            self._meet_fault("after", handle, deadline)
        finally:
            source.leases.end_send(handle.request_id, theirs)
        source.leases.release(handle.request_id)

    def fetch_early(
        self, handle: KVHandle, pages: Sequence[int], timeout_s: float, skip: int = 0
    ) -> Landing:
        check_room(handle, pages, skip)
        leases, have = self._source(handle).leases, skip
        while True:
            try:
                ready = leases.ready(handle.request_id, have).result(timeout_s)
            except TimeoutError:
                raise TransferError(f"{handle.request_id} makes no progress") from None
            if ready is None:
                raise TransferError(f"{handle.request_id} is promised no longer")
            if ready.is_complete:
                started = time.monotonic()
                self.fetch(handle, pages[have - skip :], timeout_s, have)
                return Landing(ready.token, time.monotonic() - started)
            if ready.num_pages > have:
                self._copy_promised(handle, pages, have - skip, ready.num_pages, skip)
                have = ready.num_pages

    def _copy_promised(
        self, handle: KVHandle, pages: Sequence[int], start: int, stop: int, skip: int
    ) -> None:
        source = self._source(handle)
        theirs = source.leases.peek(handle.request_id, stop)
        if theirs is None:
            raise TransferError(f"{handle.request_id} is promised no longer")
        with torch.inference_mode():
            records = source.pool[list(theirs[skip + start :])]
            if not source.leases.holds(handle.request_id, theirs):
                raise TransferError(f"{handle.request_id} was revoked while it was copied")
            ours = list(pages[start : stop - skip])
            self._self.pool[ours] = records.to(self._self.pool.device)

    def renew(self, handle: KVHandle) -> bool:
        try:
            return self._network.find(handle).leases.renew(handle.request_id)
        except TransferError:
            return False

    def release(self, handle: KVHandle) -> None:
        try:
            self._network.find(handle).leases.release(handle.request_id)
        except TransferError:
            return  # the lease went with its holder

    def close(self) -> None:
        self._closed = True
        self._network.leave(self._address, self._self)

    def _source(self, handle: KVHandle) -> Member:
        source = self._network.find(handle)
        mismatch = self._self.layout.mismatch(source.layout)
        if mismatch is not None:
            raise TransferError(f"layouts differ in {mismatch}")
        return source

    def _meet_fault(self, moment: Moment, handle: KVHandle, deadline: float) -> None:
        if self.fault is not None:
            self.fault(moment, handle)
        if self._closed:
            raise TransferError("transport closed")
        if time.monotonic() > deadline:
            raise TransferError(f"{handle.request_id} timed out")
