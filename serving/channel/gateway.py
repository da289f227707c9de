"""The gateway's end: a link to each worker, and ``serving.pools.Pools`` over all of them.

It knows addresses, streams and silence. It refuses to know what a request means, and who belongs to
which pool: ``update`` is told.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeVar

import grpc

from kvtransfer.control import ClusterTls, credentials
from protos import evenflow_pb2 as pb
from protos import evenflow_pb2_grpc as rpc
from serving import messages
from serving.channel.wire import OPTIONS, Broken, Count, Stance
from serving.mailbox import Mailbox
from serving.pools import Submission, WorkerLost, WorkerView
from workers.core.output import KVLedger, Load, Output
from workers.core.pace import Pace

LATE_S = 0.5  # how late a timeout may fire and still count
SILENCE_S = 10.0  # a worker that says nothing for this long is lost
CONNECT_TIMEOUT_S = 5.0
RETRY_S = (0.1, 2.0)  # first and longest pause before attaching again
CALL_TIMEOUT_S = 5.0

_CLIENT_OPTIONS = (
    *OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new attempt never waits for an old one's backoff
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class Connection(Protocol):
    """The stream to one worker, while it is open."""

    async def read(self) -> pb.Event | object:
        """The next event; anything else when there will be none. AioRpcError."""
        ...

    async def ledger(self) -> pb.KVLedger:
        """AioRpcError."""
        ...


# address, commands and the deployment's token, to a connection that ends with its context
Connect = Callable[[str, AsyncIterator[pb.Command], str], AbstractAsyncContextManager[Connection]]


class _Call:
    def __init__(self, worker: rpc.WorkerStub, commands: AsyncIterator[pb.Command], token: str):
        self._worker, self._metadata = worker, credentials(token)
        self.read = worker.Attach(commands, metadata=self._metadata).read

    async def ledger(self) -> pb.KVLedger:
        return await self._worker.GetKVLedger(
            pb.KVLedgerRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata
        )


@asynccontextmanager
async def over_grpc(
    address: str,
    commands: AsyncIterator[pb.Command],
    token: str,
    *,
    tls: ClusterTls | None = None,
) -> AsyncIterator[Connection]:
    plain = grpc.aio.insecure_channel
    make = plain if tls is None else tls.aio_channel
    async with make(address, options=_CLIENT_OPTIONS) as channel:
        yield _Call(rpc.WorkerStub(channel), commands, token)


class _Link:
    """One worker: attached, or trying to be, until it is retired."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        stall_timeout_s: float,
        on_change: Callable[[str], None],
        open: Callable[[str, AsyncIterator[pb.Command]], AbstractAsyncContextManager[Connection]],
        clock: Callable[[], float],
    ) -> None:
        self._open, self._clock = open, clock
        self.worker_id = worker_id
        self.address = address
        self._on_change = on_change
        self._stance = Stance("")
        self.retired = False  # takes nothing new, ends with its last stream
        self._stall_timeout_s = stall_timeout_s
        self._hello: pb.Hello | None = None
        self._load = Load()
        self._pace: Pace | None = None
        self._progress_at = 0.0
        self._stuck_at_step: int | None = None  # it stopped here; not trusted until it moves
        self._streams: dict[str, Mailbox[Output | str]] = {}  # a str: lost, and why
        self._commands = _Commands()
        self._connection: Connection | None = None
        self._task = asyncio.create_task(self._run(), name=f"link {worker_id}")

    @property
    def view(self) -> WorkerView | None:
        """None while no request should go there."""
        hello = self._hello
        if hello is None or self.retired or self._stuck_at_step is not None:
            return None
        return WorkerView(
            id=self.worker_id,
            role=self._stance.role,
            load=self._load,
            num_pages=hello.num_pages,
            page_size=hello.page_size,
            max_model_len=hello.max_model_len,
            is_leaving=self._stance.is_leaving,
            pace=self._pace,
        )

    def open(self, submission: Submission) -> Mailbox[Output | str]:
        request_id = submission.request.id
        if self._hello is None or self.retired:
            raise WorkerLost(f"{self.worker_id} is not attached")
        assert request_id not in self._streams, f"{request_id} is already on {self.worker_id}"
        stream = self._streams[request_id] = Mailbox()
        submit = messages.submission_to_wire(submission, self._clock())
        self._commands.put(pb.Command(submit=submit), self._clock())
        return stream

    def close(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if self.retired and not self._streams:
            self._task.cancel()

    def tell(self, command: pb.Command) -> None:
        if self._hello is not None:  # a broken stream aborts by itself what came over it
            self._commands.put(command, self._clock())

    def retire(self) -> None:
        self.retired = True
        if not self._streams:
            self._task.cancel()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def ledger(self) -> KVLedger:
        if self._connection is None:
            raise WorkerLost(f"{self.worker_id} is not attached")
        return messages.ledger_from_wire(await self._connection.ledger())

    async def _run(self) -> None:
        pause = RETRY_S[0]
        while not self.retired:
            reason = "the gateway is closing"
            try:
                await self._stay_attached()
            except (Broken, TimeoutError, grpc.aio.AioRpcError) as error:
                reason = _reason(error)
            finally:
                was_attached = self._hello is not None
                self._lose(reason)
            if was_attached:
                log.warning("worker %s lost: %s", self.worker_id, reason)
                pause = RETRY_S[0]
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_S[1])

    async def _stay_attached(self) -> None:
        self._commands, count = _Commands(), Count()
        async with self._open(self.address, self._commands.sent()) as connection:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                first = _expect(await connection.read(), "hello")
            count.is_next(first.number)
            self._greet(first.hello, connection)
            while True:
                patience_s = min(SILENCE_S, self._stall_timeout_s)
                event = _expect(await _patiently(connection.read(), patience_s), "report")
                if count.is_next(event.number):
                    self._take(event.report, self._clock())

    def _greet(self, hello: pb.Hello, connection: Connection) -> None:
        if hello.worker_id != self.worker_id:
            raise Broken(f"{self.address} is now {hello.worker_id}")
        self._progress_at = self._clock()
        self._stance = Stance(hello.role)
        self._connection, self._hello = connection, hello
        if not self._load.num_pages:  # nothing reported yet
            self._load = Load(num_pages=hello.num_pages, free_pages=hello.num_pages)

    def _take(self, report: pb.Report, now: float) -> None:
        load = messages.load_from_wire(report.load)
        waits = load.waiting_seqs and not load.leased_pages  # else it may wait for a lease to end
        if load.step != self._load.step or not (load.running_seqs or waits):
            self._progress_at, self._stuck_at_step = now, None
        self._load = load
        if report.HasField("pace"):
            self._pace = messages.pace_from_wire(report.pace)
        for message in report.outputs:
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.put(messages.output_from_wire(message))
        stance = Stance(report.role, report.is_leaving)
        if stance != self._stance:
            self._stance = stance
            self._on_change(self.worker_id)
        if self._commands.unheard_s(report.heard, now) > min(SILENCE_S, self._stall_timeout_s):
            raise Broken("it does not hear what it is told")
        if now - self._progress_at > self._stall_timeout_s:
            self._stuck_at_step = load.step
            raise Broken(f"no progress for {self._stall_timeout_s:g} s at step {load.step}")

    def _lose(self, reason: str) -> None:
        self._hello = self._connection = None
        for stream in self._streams.values():
            stream.put(reason)


async def _patiently(read: Awaitable[T], timeout_s: float) -> T:
    """What is read. TimeoutError when nothing comes; a timeout that fires late says only that this
    process was frozen itself, and nothing about the worker."""
    task = asyncio.ensure_future(read)
    try:
        while True:
            due = time.monotonic() + timeout_s
            await asyncio.wait({task}, timeout=timeout_s)
            if task.done():
                return task.result()
            if time.monotonic() - due < LATE_S:
                raise TimeoutError
    finally:
        task.cancel()


class _Commands:
    """What is said over one stream, numbered, and how much of it has been heard."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[pb.Command] = asyncio.Queue()
        self._num_said = 0
        self._unheard: deque[tuple[int, float]] = deque()  # number and when, oldest first

    def put(self, command: pb.Command, now: float) -> None:
        self._num_said += 1
        command.number = self._num_said
        self._unheard.append((command.number, now))
        self._queue.put_nowait(command)

    async def sent(self) -> AsyncIterator[pb.Command]:
        while True:
            yield await self._queue.get()

    def unheard_s(self, heard: int, now: float) -> float:
        """For how long the oldest one has not been heard, ``heard`` being the last that was."""
        while self._unheard and self._unheard[0][0] <= heard:
            self._unheard.popleft()
        return now - self._unheard[0][1] if self._unheard else 0.0


def _expect(event: pb.Event | object, kind: str) -> pb.Event:
    if not isinstance(event, pb.Event):
        raise Broken("the worker closed the stream")
    if event.WhichOneof("event") != kind:
        raise Broken(f"a {event.WhichOneof('event')} came instead of a {kind}")
    return event


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error) or "the worker is silent"


class ChannelPools:
    """``serving.pools.Pools`` over channels. Lives on one event loop; ``close`` ends its tasks."""

    def __init__(
        self,
        *,
        stall_timeout_s: float = 60.0,
        token: str = "",
        connect: Connect = over_grpc,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stall_timeout_s, self._clock = stall_timeout_s, clock
        self._open = lambda address, commands: connect(address, commands, token)
        self._links: dict[str, _Link] = {}
        self._retired: list[_Link] = []  # finish their streams
        self._listeners: list[Callable[[str], None]] = []

    def update(self, addresses: Mapping[str, str]) -> None:
        """The workers that exist now: id to ``host:port``. Who is missing takes nothing new."""
        self._retired = [link for link in self._retired if not link.is_over]
        for worker_id, link in list(self._links.items()):
            if addresses.get(worker_id) != link.address:
                link.retire()
                self._retired.append(self._links.pop(worker_id))
        for worker_id, address in addresses.items():
            if worker_id not in self._links:
                self._links[worker_id] = _Link(
                    worker_id,
                    address,
                    self._stall_timeout_s,
                    self._changed,
                    self._open,
                    self._clock,
                )

    def workers(self) -> list[WorkerView]:
        return [view for link in self._links.values() if (view := link.view) is not None]

    async def submit(self, worker_id: str, submission: Submission) -> AsyncGenerator[Output, None]:
        link = self._links.get(worker_id)
        if link is None:
            raise WorkerLost(f"{worker_id} is not a worker here")
        stream = link.open(submission)
        try:
            while True:
                output = await stream.get()
                if isinstance(output, str):
                    raise WorkerLost(f"{worker_id}: {output}")
                yield output
                if output.is_last:
                    return
        finally:
            link.close(submission.request.id)

    def abort(self, worker_id: str, request_id: str) -> None:
        self._tell(worker_id, pb.Command(abort=request_id))

    def reserve(self, worker_id: str, submission: Submission) -> None:
        submit = messages.submission_to_wire(submission, self._clock())
        self._tell(worker_id, pb.Command(submit=submit))

    def hand_off(self, worker_id: str, request_id: str) -> None:
        self._tell(worker_id, pb.Command(hand_off=request_id))

    def set_role(self, worker_id: str, role: str) -> None:
        self._tell(worker_id, pb.Command(set_role=role))

    def drain(self, worker_id: str) -> None:
        self._tell(worker_id, pb.Command(drain=True))

    def on_change(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    def _tell(self, worker_id: str, command: pb.Command) -> None:
        for link in (self._links.get(worker_id), *self._retired):
            if link is not None and link.worker_id == worker_id:
                link.tell(command)

    def _changed(self, worker_id: str) -> None:
        for listener in self._listeners:
            listener(worker_id)

    async def ledger(self, worker_id: str) -> KVLedger:
        """Who holds each page there. WorkerLost when nobody answers; needs ``debug`` there."""
        link = self._links.get(worker_id)
        if link is None:
            raise WorkerLost(f"{worker_id} is not a worker here")
        try:
            return await link.ledger()
        except grpc.aio.AioRpcError as error:
            raise WorkerLost(f"{worker_id}: {_reason(error)}") from error
        except asyncio.CancelledError:  # ours, or of a call whose channel was closed under it?
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise WorkerLost(f"{worker_id} is not attached any more") from None

    async def close(self) -> None:
        links = [*self._links.values(), *self._retired]
        self._links.clear()
        self._retired.clear()
        await asyncio.gather(*(link.stop() for link in links))
