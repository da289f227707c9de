"""Both ends of the stream between a gateway and a worker: commands out, one report per step back.

    gateway loop                                worker loop              engine thread
    ChannelPools ── _Link ══ Worker.Attach ══ WorkerServer ── submit, abort ──► Engine
      submit() ◄─ one queue per request ◄══ one Event per step ◄─ call_soon_threadsafe ─ emit

It knows addresses, streams and silence. It refuses to know what a request means, and who belongs to
which pool: ``update`` is told.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import grpc

from kvtransfer.control import ClusterTls, TokenCheck, credentials
from protos import evenflow_pb2 as pb
from protos import evenflow_pb2_grpc as rpc
from serving import messages
from serving.pools import Submission, WorkerLost, WorkerView
from workers.core.output import KVLedger, Load, Output, Report
from workers.core.pace import Pace
from workers.core.request import Sequence

HEARTBEAT_S = 0.5  # a load report at least this often, and how fast the worker is
LATE_S = 0.5  # how late a timeout may fire and still count
SILENCE_S = 10.0  # a worker that says nothing for this long is lost
CONNECT_TIMEOUT_S = 5.0
RETRY_S = (0.1, 2.0)  # first and longest pause before attaching again
CALL_TIMEOUT_S = 5.0
MAX_PENDING_OUTPUTS = 100_000  # for a gateway that does not read: then its stream is cut
MAX_MESSAGE_BYTES = 256 << 20

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),  # a host that vanished is noticed within 10 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.so_reuseport", 0),
)
_CLIENT_OPTIONS = (
    *_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new attempt never waits for an old one's backoff
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class _Broken(Exception):
    """The stream is of no use any more; the message says why."""


@dataclass(slots=True)
class Count:
    """What one end has heard of a stream. gRPC keeps order and loses nothing; what stands between
    may not, and a message that is lost or repeated must not become a token that is."""

    heard: int = 0

    def is_next(self, number: int) -> bool:
        """False: heard before. _Broken when one is missing."""
        if number > self.heard + 1:
            raise _Broken(f"message {number} came after {self.heard}")
        is_new = number > self.heard
        self.heard = max(self.heard, number)
        return is_new


# ------------------------------------------------------------------------------- worker's end


class Engine(Protocol):
    """What the worker's end needs of ``workers.engine.Engine``."""

    def submit(self, seq: Sequence) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def hand_off(self, request_id: str) -> None: ...
    def load(self) -> Load: ...
    def pace(self) -> Pace: ...
    def ledger(self) -> KVLedger: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself when a gateway attaches."""

    worker_id: str
    incarnation: str
    role: str
    max_model_len: int
    num_pages: int
    page_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Stance:
    """What a worker wants to do now. Both ends: the worker tells it with every report."""

    role: str
    is_leaving: bool = False


@dataclass(slots=True, eq=False)
class _Attached:
    """One gateway: what it was not told yet. Outputs of several steps merge while it is busy."""

    load: Load = field(default_factory=Load)
    stance: Stance = Stance("")
    pace: Pace | None = None  # when it is time to tell it
    outputs: list[Output] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    count: Count = field(default_factory=Count)  # of its commands
    num_events: int = 0

    def put(self, outputs: Iterable[Output], load: Load, stance: Stance) -> None:
        self.outputs.extend(outputs)
        self.load, self.stance = load, stance
        self.news.set()

    async def take(self) -> pb.Event:
        await self.news.wait()
        self.news.clear()
        outputs, self.outputs = self.outputs, []
        pace, self.pace = self.pace, None
        report = pb.Report(
            outputs=map(messages.output_to_wire, outputs),
            load=messages.load_to_wire(self.load),
            role=self.stance.role,
            is_leaving=self.stance.is_leaving,
            heard=self.count.heard,
            pace=None if pace is None else messages.pace_to_wire(pace),
        )
        return self.numbered(pb.Event(report=report))

    def numbered(self, event: pb.Event) -> pb.Event:
        self.num_events += 1
        event.number = self.num_events
        return event


class WorkerServer:
    """Serves one engine to any number of gateways.

    The order of life: ``bind`` (the address is known now, and the engine can be made with it),
    ``start`` (with the engine), ``stop``. ``emit`` is the engine's: any thread, once bound.
    """

    def __init__(
        self,
        *,
        debug: bool = False,
        token: str = "",
        tls: ClusterTls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._debug = debug
        self._check, self._tls = TokenCheck(token), tls
        self._clock = clock
        self._gateways: set[_Attached] = set()
        self._owner: dict[str, _Attached] = {}  # until the engine's last word on the request
        self._early: dict[str, _Attached] = {}  # of early ones nothing is told
        self._heart: asyncio.Task[None] | None = None

    async def bind(self, host: str, port: int = 0) -> str:
        """Take a port; the address as others reach it. OSError when the port is taken."""
        self._loop = asyncio.get_running_loop()
        self.server = grpc.aio.server(interceptors=(self._check,), options=_SERVER_OPTIONS)
        try:
            if self._tls is None:
                bound = self.server.add_insecure_port(f"{host}:{port}")
            else:
                bound = self.server.add_secure_port(f"{host}:{port}", self._tls.server())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}") from error
        return f"{host}:{bound}"

    async def start(self, engine: Engine, identity: Identity) -> None:
        """Other services belong onto ``server`` before this."""
        self.attend(engine, identity)
        rpc.add_WorkerServicer_to_server(self, self.server)
        await self.server.start()

    def attend(self, engine: Engine, identity: Identity) -> None:
        """What there is without a port: ``Attach`` may be called, on this loop."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._stance = Stance(identity.role)
        self._hello = _hello(identity)
        self._heart = asyncio.create_task(self._beat())

    def leave(self) -> None:
        """Tell the gateways to send nothing new, and to take their streams elsewhere."""
        self._stand(replace(self._stance, is_leaving=True))

    async def stop(self) -> None:
        """Cut every stream. Whatever came over them is aborted."""
        await self.rest()
        await self.server.stop(grace=None)

    async def rest(self) -> None:
        """End what ``attend`` began."""
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.gather(self._heart, return_exceptions=True)

    def emit(self, report: Report) -> None:
        """From the engine's thread: one wake-up of the loop per step."""
        self._loop.call_soon_threadsafe(self._deliver, report)

    @property
    def num_requests(self) -> int:
        """Requests whose last output has not been made yet."""
        return len(self._owner)

    async def Attach(
        self,
        request_iterator: AsyncIterator[pb.Command],
        context: "grpc.aio.ServicerContext[pb.Command, pb.Event]",
    ) -> AsyncIterator[pb.Event]:
        gateway = _Attached()
        self._gateways.add(gateway)
        reader = asyncio.create_task(self._listen(request_iterator, gateway))
        reader.add_done_callback(lambda _: gateway.news.set())
        try:
            yield gateway.numbered(pb.Event(hello=self._hello))
            gateway.pace = self._engine.pace()
            gateway.put((), self._engine.load(), self._stance)
            while not reader.done() and len(gateway.outputs) < MAX_PENDING_OUTPUTS:
                yield await gateway.take()
        finally:
            self._gateways.discard(gateway)
            reader.cancel()
            for owners in (self._owner, self._early):
                for request_id in [i for i, owner in owners.items() if owner is gateway]:
                    self._engine.abort(request_id)
            self._early = {i: owner for i, owner in self._early.items() if owner is not gateway}

    async def GetKVLedger(
        self,
        request: pb.KVLedgerRequest,
        context: "grpc.aio.ServicerContext[pb.KVLedgerRequest, pb.KVLedger]",
    ) -> pb.KVLedger:
        if not self._debug:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "debug is off on this worker")
        return messages.ledger_to_wire(await asyncio.to_thread(self._engine.ledger))

    async def _listen(self, commands: AsyncIterator[pb.Command], gateway: _Attached) -> None:
        """Until the stream ends."""
        try:
            async for command in commands:
                if gateway.count.is_next(command.number):
                    self._obey(command, gateway)
        except _Broken as error:
            log.warning("a gateway's stream is ended: %s", error)

    def _obey(self, command: pb.Command, gateway: _Attached) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._submit(command.submit, gateway)
            case "abort":
                self._early.pop(command.abort, None)
                self._engine.abort(command.abort)
            case "hand_off":
                self._engine.hand_off(command.hand_off)
            case "set_role":
                self._stand(Stance(command.set_role))
            case "drain":
                self.leave()

    def _stand(self, stance: Stance) -> None:
        self._stance = stance
        self._deliver(Report((), self._engine.load()))

    def _submit(self, message: pb.Submit, gateway: _Attached) -> None:
        """Hand the request to the engine; one that it cannot take ends here, alone."""
        request_id = message.request_id
        error = None
        if request_id in self._owner:
            error = "a request of this id is still running"
        elif message.early:
            self._early[request_id] = gateway
            self._engine.submit(messages.sequence_from_wire(message, self._clock()))
        else:
            self._early.pop(request_id, None)
            self._owner[request_id] = gateway
            try:
                self._engine.submit(messages.sequence_from_wire(message, self._clock()))
            except ValueError as refusal:
                del self._owner[request_id]
                error = str(refusal)
        if error is not None:
            refused = Output(request_id, finish_reason="error", error=error)
            gateway.put([refused], self._engine.load(), self._stance)

    def _deliver(self, report: Report) -> None:
        batches: dict[_Attached, list[Output]] = defaultdict(list)
        for output in report.outputs:
            owner = self._owner.get(output.request_id)
            if owner is not None:
                batches[owner].append(output)
                if output.is_last:
                    del self._owner[output.request_id]
        for gateway in self._gateways:
            gateway.put(batches.get(gateway, ()), report.load, self._stance)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            pace = self._engine.pace()
            for gateway in self._gateways:
                gateway.pace = pace
            self._deliver(Report((), self._engine.load()))


def _hello(identity: Identity) -> pb.Hello:
    return pb.Hello(
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        role=identity.role,
        max_model_len=identity.max_model_len,
        num_pages=identity.num_pages,
        page_size=identity.page_size,
        vocab_size=identity.vocab_size,
    )


# ------------------------------------------------------------------------------ gateway's end


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
        self._streams: dict[str, asyncio.Queue[Output | str]] = {}  # a str: lost, and why
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

    def open(self, submission: Submission) -> "asyncio.Queue[Output | str]":
        request_id = submission.request.id
        if self._hello is None or self.retired:
            raise WorkerLost(f"{self.worker_id} is not attached")
        assert request_id not in self._streams, f"{request_id} is already on {self.worker_id}"
        stream = self._streams[request_id] = asyncio.Queue()
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
            except (_Broken, TimeoutError, grpc.aio.AioRpcError) as error:
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
            raise _Broken(f"{self.address} is now {hello.worker_id}")
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
                stream.put_nowait(messages.output_from_wire(message))
        stance = Stance(report.role, report.is_leaving)
        if stance != self._stance:
            self._stance = stance
            self._on_change(self.worker_id)
        if self._commands.unheard_s(report.heard, now) > min(SILENCE_S, self._stall_timeout_s):
            raise _Broken("it does not hear what it is told")
        if now - self._progress_at > self._stall_timeout_s:
            self._stuck_at_step = load.step
            raise _Broken(f"no progress for {self._stall_timeout_s:g} s at step {load.step}")

    def _lose(self, reason: str) -> None:
        self._hello = self._connection = None
        for stream in self._streams.values():
            stream.put_nowait(reason)


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
        raise _Broken("the worker closed the stream")
    if event.WhichOneof("event") != kind:
        raise _Broken(f"a {event.WhichOneof('event')} came instead of a {kind}")
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
