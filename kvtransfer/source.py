"""The sending side: reads leased pages and sends them to whoever asks with the right words.

One thread per receiver does all that can wait: joining the pair, copying, sending. The control
server's event loop only hands work to it.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtransfer.control import NoLease, NoPair
from kvtransfer.core.handle import KVLayout
from kvtransfer.deadline import Deadline
from kvtransfer.leases import Leases, Ready
from kvtransfer.messages import layout_from_wire
from kvtransfer.pair import Pair, seal
from kvtransfer.rendezvous import SOURCE_RANK, Rendezvous
from kvtransfer.staging import Memory, Piece, Staging, cut
from kvtransfer.transport import TransferError
from protos import evenflow_pb2 as pb

log = logging.getLogger(__name__)
MAX_REMEMBERED = 1024  # of what a receiver asked for, to know a message that comes twice


@dataclass(frozen=True, slots=True)
class Cargo:
    """The leased pages that the receiver lacks, in the order of the lease; copied when drawn."""

    num_pages: int
    pieces: Iterable[Piece]


class _Outgoing:
    """One generation of the pair to one receiver, and the thread that serves it.

    ``submit`` and ``kill`` are called under the lock of the ``PageSource``.
    """

    def __init__(self, generation: int, rendezvous: Rendezvous, device: torch.device) -> None:
        self.generation = generation
        self.pair: Pair | None = None
        self.is_dead = False
        self.num_queued = 0
        self.num_sent = 0  # transfers so far; on the pair's own thread
        self._asked: OrderedDict[int, None] = OrderedDict()  # the receiver's newest numbers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-send")
        self._thread.submit(self._join, rendezvous, device)

    def submit(self, work: Callable[[], None], ask: int | None = None) -> None:
        """Queue a transfer; NoPair when the pair has failed, or ``ask`` was asked before."""
        if self.is_dead or ask in self._asked:
            raise NoPair(f"transfer {ask}: the pair is closed, or it was asked before")
        if ask is not None:
            self._asked[ask] = None
            if len(self._asked) > MAX_REMEMBERED:
                self._asked.popitem(last=False)
        self.num_queued += 1
        self._thread.submit(work)

    def kill(self) -> None:
        """No new transfer from here on; the pair is dropped when the running one ends."""
        if not self.is_dead:
            self.is_dead = True
            self._thread.submit(self.drop)
            self._thread.shutdown(wait=False)

    def wait(self) -> None:
        self._thread.shutdown(wait=True)

    def drop(self) -> None:
        """On the pair's own thread."""
        pair, self.pair = self.pair, None
        if pair is not None:
            pair.drop()

    def _join(self, rendezvous: Rendezvous, device: torch.device) -> None:
        rendezvous.run()
        try:
            self.pair = Pair(rendezvous, device)
        except RuntimeError as error:
            log.warning("could not join a pair: %s", error)


@dataclass(frozen=True, slots=True)
class _Answer:
    """To a receiver that asked for pages, or for how far they are. Whoever waits for ``future`` can
    cancel it until the transfer begins, and never afterwards: then the bytes are on their way."""

    future: "Future[Any]"
    ready: pb.ReadyResponse | None = None  # that the announcement belongs into

    def announce(self, sent: pb.SendResponse) -> None:
        if self.ready is None:
            self.future.set_result(sent)
        else:
            self.ready.sent.CopyFrom(sent)
            self.future.set_result(self.ready)


def _nothing() -> None:
    """There is no pin to take away."""


class PageSource:
    """Implements ``control.Endpoint`` over one worker's pool and leases."""

    def __init__(
        self,
        pool: Tensor,
        layout: KVLayout,
        leases: Leases,
        *,
        host: str,
        incarnation: str,
        device: torch.device,
        timeout_s: float,
        max_pairs: int,
    ) -> None:
        self._records = pool.view(pool.shape[0], -1)  # [page, elements of one page]
        self._layout = layout
        self._leases = leases
        self._host = host
        self._incarnation = incarnation
        self._device = device
        self._timeout_s = timeout_s
        self._max_pairs = max_pairs
        self._staging = Staging(device)
        self._pairs: OrderedDict[str, _Outgoing] = OrderedDict()  # by receiver, last used last
        self._lock = threading.Lock()
        self._is_closed = False

    def open(self, request: pb.OpenRequest) -> Future[dict[str, bytes]]:
        self._check_incarnation(request.incarnation)
        mismatch = self._layout.mismatch(layout_from_wire(request.layout))
        if mismatch is not None:
            raise TransferError(f"layouts differ in {mismatch}")
        with self._lock:
            if self._is_closed:
                raise TransferError("closed")
            old = self._pairs.get(request.target)
            if old is not None:
                if old.generation >= request.generation:
                    raise TransferError(f"generation {request.generation} is over")
                old.kill()
            rendezvous = Rendezvous(SOURCE_RANK, self._host, self._device, self._timeout_s)
            rendezvous.hear(request.entries)
            outgoing = _Outgoing(request.generation, rendezvous, self._device)
            self._pairs[request.target] = outgoing
            self._pairs.move_to_end(request.target)
            self._evict()
        return rendezvous.entries

    def send(self, request: pb.SendRequest) -> Future[pb.SendResponse]:
        self._check_incarnation(request.incarnation)
        deadline = Deadline.after(request.timeout_s)
        answer: Future[pb.SendResponse] = Future()
        with self._lock:
            outgoing = self._pair(request.target, request.generation)
            outgoing.submit(
                lambda: self._serve(outgoing, request, deadline, _Answer(answer)), request.transfer
            )
        return answer

    def ready(self, request: pb.ReadyRequest) -> Future[pb.ReadyResponse]:
        """On the thread that makes the pages ready, their sending is queued as well."""
        self._check_incarnation(request.incarnation)
        answer: Future[pb.ReadyResponse] = Future()
        waiting = self._leases.ready(request.request_id, request.num_pages)
        waiting.add_done_callback(lambda done: self._go_on(request, done, answer))
        answer.add_done_callback(lambda done: done.cancelled() and waiting.cancel())
        return answer

    def _go_on(
        self,
        request: pb.ReadyRequest,
        waiting: "Future[Ready | None]",
        answer: Future[pb.ReadyResponse],
    ) -> None:
        if waiting.cancelled():
            return
        ready = waiting.result()
        if ready is None:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(NoLease(f"no lease for {request.request_id}"))
            return
        response = pb.ReadyResponse(
            num_pages=ready.num_pages, is_complete=ready.is_complete, token=ready.token
        )
        is_news = ready.num_pages > request.num_pages
        is_coming = is_news and self._send_ready(request, _Answer(answer, response))
        if not is_coming and answer.set_running_or_notify_cancel():
            answer.set_result(response)

    def _send_ready(self, request: pb.ReadyRequest, answer: _Answer) -> bool:
        """Send what is ready over a pair that is up; else the receiver has to ask for it."""
        assert answer.ready is not None, "announced together with what is ready"
        send = pb.SendRequest(
            request_id=request.request_id,
            first_page=request.num_pages,
            stop_page=answer.ready.num_pages,
        )
        deadline = Deadline.after(2 * request.timeout_s)  # the wait has one, the transfer another
        with self._lock:
            try:
                outgoing = self._pair(request.target, request.generation)
                outgoing.submit(lambda: self._serve(outgoing, send, deadline, answer))
            except NoPair:
                return False
        return True

    def _pair(self, target: str, generation: int) -> _Outgoing:
        """Under the lock. NoPair."""
        outgoing = self._pairs.get(target)
        if outgoing is None or outgoing.generation != generation:
            raise NoPair(f"no pair of generation {generation}")
        self._pairs.move_to_end(target)
        return outgoing

    def renew(self, request_ids: Sequence[str], incarnation: str) -> list[str]:
        is_ours = incarnation == self._incarnation
        return [name for name in request_ids if not (is_ours and self._leases.renew(name))]

    def release(self, request_id: str, incarnation: str) -> None:
        if incarnation == self._incarnation:
            self._leases.release(request_id)

    def close(self) -> None:
        """End every thread. A transfer under way ends first, by its deadline at the latest."""
        with self._lock:
            self._is_closed = True
            pairs, self._pairs = list(self._pairs.values()), OrderedDict()
            for outgoing in pairs:
                outgoing.kill()
        for outgoing in pairs:
            outgoing.wait()

    def _serve(
        self,
        outgoing: _Outgoing,
        request: pb.SendRequest,
        deadline: Deadline,
        answer: _Answer,
    ) -> None:
        """One transfer, on the pair's thread. What it cannot tell the receiver, it logs."""
        failure: str | None = None
        try:
            if not answer.future.set_running_or_notify_cancel():
                return  # the receiver no longer waits, and nothing has been announced
            if outgoing.pair is None:
                raise TransferError("the pair never came up")
            with (
                self._staging.lend() as memory,
                self._load(outgoing.pair, request, memory) as cargo,
            ):
                number, outgoing.num_sent = outgoing.num_sent, outgoing.num_sent + 1
                answer.announce(pb.SendResponse(num_pages=cargo.num_pages, transfer=number))
                self._send(outgoing.pair, cargo.pieces, number, deadline)
        except NoLease as error:
            answer.future.set_exception(error)
        except Exception as error:  # this thread has no caller to tell
            failure = f"sending {request.request_id} failed: {error}"
        finally:
            with self._lock:
                outgoing.num_queued -= 1
        if failure is not None:  # here no frame holds on to the connection any more
            with self._lock:
                outgoing.kill()
            outgoing.drop()
            if answer.future.running():
                answer.future.set_exception(TransferError(failure))
            log.warning("%s", failure)

    @contextmanager
    def _load(self, pair: Pair, request: pb.SendRequest, memory: Memory) -> Iterator[Cargo]:
        """Pages that are pinned until they have been copied, and leased until the receiver has
        them."""
        name, leased = request.request_id, self._leases.begin_send(request.request_id)
        if leased is None:
            yield self._load_early(pair, request, memory)
            return
        pages = leased[request.first_page : request.stop_page or None]
        with ExitStack() as pin:
            pin.callback(self._leases.end_send, name, leased)
            yield Cargo(len(pages), self._fill(pair, pages, memory, pin.close))

    def _load_early(self, pair: Pair, request: pb.SendRequest, memory: Memory) -> Cargo:
        """The same of pages that are not leased yet. Nothing pins them: all are copied at once, and
        that counts only when the promise stands afterwards."""
        name = request.request_id
        promised = self._leases.peek(name, request.stop_page) if request.stop_page else None
        if promised is None:
            raise NoLease(f"no lease for {name}")
        pair.follow_model()
        pages = promised[request.first_page :]
        pieces = list(self._fill(pair, pages, memory, _nothing))
        if not self._leases.holds(name, promised):
            raise NoLease(f"{name} was revoked while it was copied")
        return Cargo(len(pages), pieces)

    def _fill(
        self, pair: Pair, pages: Sequence[int], memory: Memory, copied: Callable[[], None]
    ) -> Iterator[Piece]:
        """The pages piece by piece; ``copied`` is called when all are."""
        for piece in cut(memory, len(pages), self._layout.page_bytes):
            self._copy(pair, pages[piece.first : piece.stop], piece)
            if piece.stop == len(pages):
                copied()
            with pair.stream():
                seal(piece)
            yield piece

    def _copy(self, pair: Pair, pages: Sequence[int], piece: Piece) -> None:
        index = torch.tensor(pages, device=self._device)
        with torch.inference_mode(), pair.stream():
            records = piece.records.view(self._records.dtype).view(len(pages), -1)
            torch.index_select(self._records, 0, index, out=records)
        pair.synchronize()

    def _send(self, pair: Pair, pieces: Iterable[Piece], transfer: int, deadline: Deadline) -> None:
        pair.send(pieces, transfer, deadline)

    def _check_incarnation(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            raise TransferError("the worker was restarted since it granted the lease")

    def _evict(self) -> None:
        """Close idle pairs over the limit, those used longest ago first."""
        for target, outgoing in list(self._pairs.items())[:-1]:
            if len(self._pairs) <= self._max_pairs:
                return
            if outgoing.is_dead or not outgoing.num_queued:
                del self._pairs[target]
                outgoing.kill()
