"""Transport over torch.distributed: Gloo on CPU, NCCL on CUDA, one process group per pair.

The receiving side lives here and does its work on the thread that calls ``fetch``, so that nothing
can write to a page after ``fetch`` has returned. The sending side is in ``source.py``.

    receiver                                  source
       | Open(address, generation, layout)  -->  |  refused when a field of the layouts differs
       |  <=== both join the pair, once ===>   |
       | Send(request id, pages) ----------->  |  pages pinned until they are copied
       |  <-- transfer number                  |
       |  <== pages in pieces on the pair ===  |  copied and hashed while others are sent
       | checksum right: copied into the pool  |
       | Release(request id) ----------------> |  pages free
"""

import itertools
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvtransfer.control import ClusterTls, NoLease, NoPair, PagesClient, Unanswered
from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.deadline import Deadline
from kvtransfer.faults import FaultySource, PageFaults
from kvtransfer.leases import Leases
from kvtransfer.messages import layout_to_wire
from kvtransfer.pair import Pair, is_intact
from kvtransfer.rendezvous import TARGET_RANK, Rendezvous
from kvtransfer.source import PageSource
from kvtransfer.staging import Piece, Staging, cut
from kvtransfer.transport import Landing, TransferError, check_room
from protos import evenflow_pb2 as pb

ALL = 0  # as the end of what is sent: whatever the lease has
MAX_PAIRS = 16  # per direction; each costs two threads and five descriptors
MAX_LANES = 3  # pairs from one source: a transfer that got lost blocks its own until the timeout
PATIENCE_S = 0.25  # before a fetch takes the next one
ANSWER_S = 1.0  # for a source to say that it has nothing to say in time
POLL_S = 0.005


class Lost(TransferError):
    """The pair failed before a transfer's turn came: nothing of it was received."""


class Stuck(TransferError):
    """The source is busy with another transfer, and has not begun with this one."""


class _Lane:
    """The pair from one source, generation after generation. Transfers are received in the order
    in which the source sends them, each by the thread that asked for it."""

    def __init__(self, name: str) -> None:
        self.name = name  # as the source knows it
        self.opening = threading.Lock()
        self.pair: Pair | None = None
        self.generation = 0
        self.num_users = 0  # fetches; changed under the lock of the transport
        self._num_asked = 0
        self._next_transfer = 0
        self._receiving: Pair | None = None
        self._changed = threading.Condition()

    def open(self, pair: Pair, generation: int) -> None:
        with self._changed:
            self.pair, self.generation = pair, generation
            self._num_asked = self._next_transfer = 0

    def next_ask(self) -> tuple[int, int]:
        """A generation, and a number by which the source knows a message that comes twice."""
        with self._changed:
            self._num_asked += 1
            return self.generation, self._num_asked

    @contextmanager
    def turn(self, generation: int, transfer: int, deadline: Deadline) -> Iterator[Pair]:
        """The pair, for this transfer alone. Whatever goes wrong within ends the generation."""
        what = "earlier transfers had ended"
        with self._changed:
            is_mine = self._changed.wait_for(
                lambda: (
                    self.generation != generation
                    or self.pair is None
                    or self._next_transfer == transfer
                ),
                deadline.left_s(what),
            )
            pair = self.pair
            if self.generation != generation or pair is None:
                raise Lost(f"the pair failed before transfer {transfer}")
            if not is_mine:
                raise TransferError(f"timed out before {what}")
            self._receiving = pair
        try:
            yield pair
        finally:
            with self._changed:
                self._receiving = None
                self._next_transfer += 1
                self._changed.notify_all()
            if self.pair is not pair:  # dropped meanwhile, by somebody who left the rest to us
                pair.drop()

    def drop(self, generation: int | None = None) -> None:
        """Close the pair, unless a newer generation has taken its place. Whoever is receiving over
        it closes it."""
        with self._changed:
            if generation is not None and generation != self.generation:
                return
            pair, self.pair = self.pair, None
            is_used = self._receiving is not None
            self._changed.notify_all()
        if pair is not None and not is_used:
            pair.drop()


class CollectiveTransport:
    """One per worker process; ``endpoint`` is what its control server has to serve."""

    def __init__(
        self,
        pool: Tensor,
        layout: KVLayout,
        leases: Leases,
        *,
        host: str,
        incarnation: str,
        device: str | torch.device,
        timeout_s: float,
        max_pairs: int = MAX_PAIRS,
        token: str = "",
        tls: ClusterTls | None = None,
        faults: PageFaults | None = None,
    ) -> None:
        self._records = pool.view(pool.shape[0], -1)  # [page, elements of one page]
        self._layout = layout
        self._incarnation = incarnation
        self._host = host
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._max_pairs = max_pairs
        self._staging = Staging(self._device)
        self._pairs: OrderedDict[tuple[str, str, int], _Lane] = OrderedDict()  # last used last
        self._generations = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._client = PagesClient(2 * max_pairs, token, tls)
        make = PageSource if faults is None else partial(FaultySource, faults=faults)
        self.endpoint: PageSource = make(
            pool,
            layout,
            leases,
            host=host,
            incarnation=incarnation,
            device=self._device,
            timeout_s=timeout_s,
            max_pairs=max_pairs,
        )

    def fetch(
        self, handle: KVHandle, pages: Sequence[int], timeout_s: float, skip: int = 0
    ) -> None:
        deadline = Deadline.after(timeout_s)
        check_room(handle, pages, skip)
        if not pages:
            self._client.release_soon(handle)
            return
        mismatch = self._layout.mismatch(handle.layout)
        if mismatch is not None:
            raise TransferError(f"layouts differ in {mismatch}")
        self._bring(handle, pages, skip, ALL, deadline)
        self._client.release_soon(handle)

    def fetch_early(
        self, handle: KVHandle, pages: Sequence[int], timeout_s: float, skip: int = 0
    ) -> Landing:
        check_room(handle, pages, skip)
        mismatch = self._layout.mismatch(handle.layout)
        if mismatch is not None:
            raise TransferError(f"layouts differ in {mismatch}")
        have, is_complete = skip, False
        while not is_complete:
            ready, lane = self._wait_until_ready(handle, have, Deadline.after(timeout_s))
            heard_at = time.monotonic()
            if ready.num_pages > handle.num_pages:
                raise TransferError(f"{ready.num_pages} pages come, not {handle.num_pages}")
            if ready.num_pages > have:
                part = pages[have - skip : ready.num_pages - skip]
                deadline = Deadline.after(timeout_s)
                if not ready.HasField("sent") or not self._take_sent(lane, ready, part, deadline):
                    self._bring(handle, part, have, ready.num_pages, deadline)
            have, is_complete = max(have, ready.num_pages), ready.is_complete
        if have != handle.num_pages:
            raise TransferError(f"{have} pages came, {handle.num_pages} were promised")
        self._client.release_soon(handle)
        token = ready.token if ready.HasField("token") else None
        return Landing(token, time.monotonic() - heard_at)

    def _wait_until_ready(
        self, handle: KVHandle, have: int, deadline: Deadline
    ) -> tuple[pb.ReadyResponse, "_Open"]:
        """The answer, and over which pair it may be on its way already."""
        lane = self._lane(handle, 0)
        with self._lock:
            lane.num_users -= 1  # it may be closed while we wait: then the answer comes alone
        generation = lane.generation
        request = pb.ReadyRequest(
            request_id=handle.request_id,
            incarnation=handle.incarnation,
            num_pages=have,
            timeout_s=deadline.left_s("Ready"),
            target=lane.name,
            generation=generation if lane.pair is not None else 0,
        )
        try:
            answer = self._client.ready(handle.source, request, deadline.later(ANSWER_S))
        except Unanswered:
            lane.drop(generation)
            raise
        return answer, _Open(lane, generation)

    def _take_sent(
        self, at: "_Open", ready: pb.ReadyResponse, pages: Sequence[int], deadline: Deadline
    ) -> bool:
        """Receive what the answer announced. False when its pair was closed meanwhile."""
        with self._lock:
            at.lane.num_users += 1
        try:
            self._receive(at, ready.sent, pages, deadline)
        except Lost:
            return False
        finally:
            with self._lock:
                at.lane.num_users -= 1
        return True

    def _bring(
        self, handle: KVHandle, pages: Sequence[int], first: int, stop: int, deadline: Deadline
    ) -> None:
        """Pages [first, stop) of the handle into ``pages``, checked. One that is stuck behind
        another transfer takes the next lane, and one whose pair fails before its turn tries
        again."""
        for number in itertools.count():
            lane = self._lane(handle, min(number, MAX_LANES - 1))
            is_last = number >= MAX_LANES - 1
            patience = deadline if is_last else deadline.at_most(PATIENCE_S)
            try:
                at, answer = self._announce(lane, handle, (first, stop), patience, deadline)
                self._receive(at, answer, pages, deadline)
                return
            except (Lost, Stuck) as error:
                if number > MAX_LANES:
                    raise TransferError(str(error)) from None
            except TransferError:
                raise
            except Exception as error:  # the pair did not come up
                raise TransferError(_reason(error)) from None
            finally:
                with self._lock:
                    lane.num_users -= 1

    def renew(self, handle: KVHandle) -> bool:
        try:
            return self._client.renew(handle, Deadline.after(self._timeout_s))
        except TransferError:
            return False

    def release(self, handle: KVHandle) -> None:
        try:
            self._client.release(handle)
        except TransferError:
            return  # the lease went with its holder, or will expire

    def close(self) -> None:
        """A transfer under way ends first, by its deadline at the latest."""
        with self._lock:
            self._is_closed = True
            lanes, self._pairs = list(self._pairs.values()), OrderedDict()
        for lane in lanes:
            while lane.num_users:
                time.sleep(POLL_S)
            lane.drop()
        self._client.close()
        self.endpoint.close()

    def _receive(
        self, at: "_Open", answer: pb.SendResponse, pages: Sequence[int], deadline: Deadline
    ) -> None:
        failure: str | None = None
        try:
            with at.lane.turn(at.generation, answer.transfer, deadline) as pair:
                self._take(pair, answer, pages, deadline)
        except Lost:
            raise
        except Exception as error:  # whatever it was, the receiver can recompute
            failure = _reason(error)
        if failure is not None:  # here no frame holds on to the connection any more
            at.lane.drop(at.generation)
            raise TransferError(failure)

    def _take(
        self, pair: Pair, answer: pb.SendResponse, pages: Sequence[int], deadline: Deadline
    ) -> None:
        if answer.num_pages != len(pages):  # Gloo would end the process
            raise TransferError(f"{answer.num_pages} pages come, {len(pages)} expected")
        with self._staging.lend() as memory:
            pieces = cut(memory, len(pages), self._layout.page_bytes)
            for piece in pair.receive(pieces, answer.transfer, deadline):
                if not is_intact(piece):
                    raise TransferError("pages arrived with a wrong checksum")
                self._store(pair, piece, pages[piece.first : piece.stop])

    def _store(self, pair: Pair, piece: Piece, pages: Sequence[int]) -> None:
        with torch.inference_mode(), pair.stream():
            records = piece.records.view(self._records.dtype).view(len(pages), -1)
            # On a CPU three times as fast as index_copy_.
            torch._foreach_copy_([self._records[page] for page in pages], list(records))
        pair.synchronize()

    def _announce(
        self,
        lane: _Lane,
        handle: KVHandle,
        part: tuple[int, int],
        patience: Deadline,
        deadline: Deadline,
    ) -> tuple["_Open", pb.SendResponse]:
        """Agree with the source on what comes next over the pair; the bytes follow at once."""
        if lane.pair is not None:
            try:
                return self._ask(lane, handle, part, patience, deadline)
            except NoPair:  # closed there to stay under its limit, or after its own failure
                lane.drop()
        self._open(lane, handle, deadline)
        return self._ask(lane, handle, part, deadline, deadline)

    def _ask(
        self,
        lane: _Lane,
        handle: KVHandle,
        part: tuple[int, int],
        patience: Deadline,
        deadline: Deadline,
    ) -> tuple["_Open", pb.SendResponse]:
        generation, number = lane.next_ask()
        request = pb.SendRequest(
            target=lane.name,
            generation=generation,
            request_id=handle.request_id,
            transfer=number,
            timeout_s=deadline.left_s("Send"),
            incarnation=handle.incarnation,
            first_page=part[0],
            stop_page=part[1],
        )
        try:
            answer = self._client.send(handle.source, request, patience)
        except (NoLease, NoPair):
            raise  # nothing was sent, and over a pair that is there it still can be
        except TransferError:
            if patience is not deadline and patience.is_over:
                raise Stuck(f"{handle.source} is busy with another transfer") from None
            lane.drop(generation)
            raise
        return _Open(lane, generation), answer

    def _open(self, lane: _Lane, handle: KVHandle, deadline: Deadline) -> None:
        if not lane.opening.acquire(timeout=deadline.left_s("Open")):
            raise TransferError("timed out before another fetch had opened the pair")
        try:
            if lane.pair is None:
                lane.open(*self._meet(lane, handle, deadline))
        finally:
            lane.opening.release()

    def _meet(self, lane: _Lane, handle: KVHandle, deadline: Deadline) -> tuple[Pair, int]:
        generation = next(self._generations)
        rendezvous = Rendezvous(TARGET_RANK, self._host, self._device, deadline.left_s("Open"))
        threading.Thread(target=rendezvous.run, name="kv-open").start()
        try:
            request = pb.OpenRequest(
                target=lane.name,
                entries=rendezvous.entries.result(deadline.left_s("Open")),
                generation=generation,
                layout=layout_to_wire(self._layout),
                incarnation=handle.incarnation,
            )
            rendezvous.hear(self._client.open(handle.source, request, deadline).entries)
        except Exception:
            rendezvous.cancel("the source refused, or was not there")
            raise
        return Pair(rendezvous, self._device, deadline.left_s("the pair was up")), generation

    def _lane(self, handle: KVHandle, number: int) -> _Lane:
        """One of the pairs from the handle's source. The caller counts itself off again."""
        key = (handle.source, handle.incarnation, number)
        with self._lock:
            if self._is_closed:
                raise TransferError("transport closed")
            lane = self._pairs.get(key)
            if lane is None:
                lane = self._pairs[key] = _Lane(f"{self._incarnation}/{number}")
            lane.num_users += 1
            self._pairs.move_to_end(key)
            evicted = self._evict()
        for other in evicted:
            other.drop()
        return lane

    def _evict(self) -> list[_Lane]:
        """Idle pairs over the limit, those used longest ago first."""
        evicted = []
        for key, lane in list(self._pairs.items())[:-1]:
            if len(self._pairs) > self._max_pairs and not lane.num_users:
                evicted.append(self._pairs.pop(key))
        return evicted


@dataclass(frozen=True, slots=True)
class _Open:
    """A lane in one of its generations."""

    lane: _Lane
    generation: int


def _reason(error: Exception) -> str:
    """The first line, without the place in torch's source where it was raised."""
    lines = str(error).splitlines() or [""]
    text = re.sub(r"^\[[^]]*\]\s*", "", lines[0])
    return text if isinstance(error, TransferError) else f"{type(error).__name__}: {text}"
