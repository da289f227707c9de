"""Transport over torch.distributed: Gloo on CPU, NCCL on CUDA, one process group per pair.

The receiving side lives here and does its work on the thread that calls ``fetch``, so that nothing
can write to a page after ``fetch`` has returned. The sending side is in ``source.py``.

    receiver                                  source
       | Open(address, generation, layout)  -->  |  refused when a field of the layouts differs
       |  <=== both join the pair, once ===>   |
       | Send(request id, transfer number) --> |  pages pinned, copied, hashed
       |  <-- number of pages, checksum        |
       |  <=== pieces of 8 MiB on the pair ==  |
       | checksum right: copied into the pool  |
       | Release(request id) ----------------> |  pages free
"""

import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvtransfer.control import ClusterTls, NoLease, NoPair, PagesClient
from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.deadline import Deadline
from kvtransfer.faults import FaultySource, PageFaults
from kvtransfer.leases import Leases
from kvtransfer.messages import layout_to_wire
from kvtransfer.pair import Pair
from kvtransfer.rendezvous import TARGET_RANK, Rendezvous
from kvtransfer.source import PageSource
from kvtransfer.staging import Staging
from kvtransfer.transport import TransferError, check_room
from protos import evenflow_pb2 as pb

ALL = 0  # as the end of what is sent: whatever the lease has
MAX_PAIRS = 16  # per direction; each costs two threads and five descriptors


class _Incoming:
    """The pair from one source. ``busy`` is held by the one fetch that uses it."""

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.pair: Pair | None = None
        self.generation = 0
        self.num_transfers = 0
        self.is_evicted = False


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
        self._pairs: OrderedDict[tuple[str, str], _Incoming] = OrderedDict()
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
    ) -> None:
        check_room(handle, pages, skip)
        mismatch = self._layout.mismatch(handle.layout)
        if mismatch is not None:
            raise TransferError(f"layouts differ in {mismatch}")
        have, is_complete = skip, False
        while not is_complete:
            ready = self._client.ready(handle, have, Deadline.after(timeout_s))
            if ready.num_pages > handle.num_pages:
                raise TransferError(f"{ready.num_pages} pages come, not {handle.num_pages}")
            if ready.num_pages > have:
                part = pages[have - skip : ready.num_pages - skip]
                self._bring(handle, part, have, ready.num_pages, Deadline.after(timeout_s))
            have, is_complete = max(have, ready.num_pages), ready.is_complete
        if have != handle.num_pages:
            raise TransferError(f"{have} pages came, {handle.num_pages} were promised")
        self._client.release_soon(handle)

    def _bring(
        self, handle: KVHandle, pages: Sequence[int], first: int, stop: int, deadline: Deadline
    ) -> None:
        """Pages [first, stop) of the handle into ``pages``, checked."""
        with self._incoming(handle, deadline) as incoming:
            failure: str | None = None
            try:
                self._receive(incoming, handle, pages, first, stop, deadline)
            except NoLease:
                raise  # nothing was sent: the pair is as good as before
            except Exception as error:  # whatever it was, the receiver can recompute
                failure = _reason(error)
            if failure is not None:  # here no frame holds on to the connection any more
                self._drop(incoming)
                raise TransferError(failure)

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
            pairs, self._pairs = list(self._pairs.values()), OrderedDict()
        for incoming in pairs:
            with incoming.busy:
                self._drop(incoming)
        self._client.close()
        self.endpoint.close()

    def _receive(
        self,
        incoming: _Incoming,
        handle: KVHandle,
        pages: Sequence[int],
        first: int,
        stop: int,
        deadline: Deadline,
    ) -> None:
        pair, answer = self._announce(incoming, handle, (first, stop), deadline)
        if answer.num_pages != len(pages):  # Gloo would end the process
            raise TransferError(f"{answer.num_pages} pages come, {len(pages)} expected")
        with self._staging.lend() as memory:
            buffer = memory.first(len(pages) * self._layout.page_bytes)
            if pair.receive(buffer, incoming.num_transfers - 1, deadline) != answer.checksum:
                raise TransferError(f"{handle.request_id} arrived with a wrong checksum")
            self._store(pair, buffer, pages)

    def _store(self, pair: Pair, buffer: Tensor, pages: Sequence[int]) -> None:
        index = torch.tensor(pages, device=self._device)
        with torch.inference_mode(), pair.stream():
            records = buffer.view(self._records.dtype).view(len(pages), -1)
            self._records.index_copy_(0, index, records)
        pair.synchronize()

    def _announce(
        self, incoming: _Incoming, handle: KVHandle, part: tuple[int, int], deadline: Deadline
    ) -> tuple[Pair, pb.SendResponse]:
        """Agree with the source on what comes next over the pair; the bytes follow at once."""
        if incoming.pair is not None:
            try:
                return incoming.pair, self._ask(incoming, handle, part, deadline)
            except NoPair:  # closed there to stay under its limit, or after its own failure
                self._drop(incoming)
        pair = self._open(incoming, handle, deadline)
        return pair, self._ask(incoming, handle, part, deadline)

    def _ask(
        self, incoming: _Incoming, handle: KVHandle, part: tuple[int, int], deadline: Deadline
    ) -> pb.SendResponse:
        request = pb.SendRequest(
            target=self._incarnation,
            generation=incoming.generation,
            request_id=handle.request_id,
            transfer=incoming.num_transfers,
            timeout_s=deadline.left_s("Send"),
            incarnation=handle.incarnation,
            first_page=part[0],
            stop_page=part[1],
        )
        incoming.num_transfers += 1
        return self._client.send(handle.source, request, deadline)

    def _open(self, incoming: _Incoming, handle: KVHandle, deadline: Deadline) -> Pair:
        incoming.generation, incoming.num_transfers = next(self._generations), 0
        rendezvous = Rendezvous(TARGET_RANK, self._host, self._device, deadline.left_s("Open"))
        threading.Thread(target=rendezvous.run, name="kv-open").start()
        try:
            request = pb.OpenRequest(
                target=self._incarnation,
                entries=rendezvous.entries.result(deadline.left_s("Open")),
                generation=incoming.generation,
                layout=layout_to_wire(self._layout),
                incarnation=handle.incarnation,
            )
            rendezvous.hear(self._client.open(handle.source, request, deadline).entries)
        except Exception:
            rendezvous.cancel("the source refused, or was not there")
            raise
        incoming.pair = Pair(rendezvous, self._device, deadline.left_s("the pair was up"))
        return incoming.pair

    def _drop(self, incoming: _Incoming) -> None:
        pair, incoming.pair = incoming.pair, None
        if pair is not None:
            pair.drop()

    @contextmanager
    def _incoming(self, handle: KVHandle, deadline: Deadline) -> Iterator[_Incoming]:
        """The pair from the handle's source, for one fetch alone."""
        name = (handle.source, handle.incarnation)
        while True:
            with self._lock:
                if self._is_closed:
                    raise TransferError("transport closed")
                incoming = self._pairs.setdefault(name, _Incoming())
                self._pairs.move_to_end(name)
                self._evict()
            what = "earlier transfers had ended"
            if not incoming.busy.acquire(timeout=deadline.left_s(what)):
                raise TransferError(f"timed out before {what}")
            try:
                if not (incoming.is_evicted or self._is_closed):
                    yield incoming
                    return
            finally:
                incoming.busy.release()

    def _evict(self) -> None:
        """Close idle pairs over the limit, those used longest ago first."""
        for name, incoming in list(self._pairs.items())[:-1]:
            if len(self._pairs) <= self._max_pairs:
                return
            if incoming.busy.acquire(blocking=False):
                incoming.is_evicted = True
                del self._pairs[name]
                self._drop(incoming)
                incoming.busy.release()


def _reason(error: Exception) -> str:
    """The first line, without the place in torch's source where it was raised."""
    lines = str(error).splitlines() or [""]
    text = re.sub(r"^\[[^]]*\]\s*", "", lines[0])
    return text if isinstance(error, TransferError) else f"{type(error).__name__}: {text}"
