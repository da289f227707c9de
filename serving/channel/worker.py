"""The worker's end: serves one engine to any number of gateways, and tells each what is its own.

It knows streams and who sent what. It refuses to know what a request means.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
)
from dataclasses import dataclass, field, replace
from typing import Protocol

import grpc

from kvtransfer.control import ClusterTls, TokenCheck
from protos import evenflow_pb2 as pb
from protos import evenflow_pb2_grpc as rpc
from serving import messages
from serving.channel.wire import HEARTBEAT_S, OPTIONS, Broken, Count, Stance
from workers.core.output import KVLedger, Load, Output, Report
from workers.core.pace import Pace
from workers.core.request import Sequence

MAX_PENDING_OUTPUTS = 100_000  # for a gateway that does not read: then its stream is cut

_SERVER_OPTIONS = (
    *OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.so_reuseport", 0),
)


log = logging.getLogger(__name__)


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


@dataclass(slots=True, eq=False)
class _Attached:
    """One gateway: what it was not told yet. Outputs of several steps merge while it is busy."""

    load: Load = field(default_factory=Load)
    stance: Stance = field(default_factory=lambda: Stance(""))
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
        report = messages.report_to_wire(
            outputs,
            self.load,
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


@dataclass(slots=True, eq=False)
class _Early:
    """A request whose token its gateway has not heard yet. What follows it, if it comes here with
    the pages, is kept until the gateway has submitted the request with it."""

    gateway: _Attached
    outputs: list[Output] = field(default_factory=list)


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
        self._early: dict[str, _Early] = {}  # of these nothing is told
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
            early = [i for i, early in self._early.items() if early.gateway is gateway]
            for request_id in [i for i, owner in self._owner.items() if owner is gateway] + early:
                self._early.pop(request_id, None)
                self._engine.abort(request_id)

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
        except Broken as error:
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
            self._early[request_id] = _Early(gateway)
            self._engine.submit(messages.sequence_from_wire(message, self._clock()))
        else:
            early = self._early.pop(request_id, None)
            self._owner[request_id] = gateway
            try:
                self._engine.submit(messages.sequence_from_wire(message, self._clock()))
            except ValueError as refusal:
                del self._owner[request_id]
                error = str(refusal)
            else:
                if early is not None and early.outputs:
                    self._deliver(Report(tuple(early.outputs), self._engine.load()))
        if error is not None:
            refused = Output(request_id, finish_reason="error", error=error)
            gateway.put([refused], self._engine.load(), self._stance)

    def _deliver(self, report: Report) -> None:
        batches: dict[_Attached, list[Output]] = defaultdict(list)
        for output in report.outputs:
            owner = self._owner.get(output.request_id)
            if output.request_id in self._early:
                self._early[output.request_id].outputs.append(output)
            elif owner is not None:
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
