"""What lies between live processes in virtual time: messages and pages, and what may happen to
them. It knows time and order; what is said over it, it only passes on."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench.sim.paged import PagedModel
from kvtransfer.core.handle import KVHandle
from kvtransfer.leases import Leases
from kvtransfer.transport import Landing, TransferError
from serving.channel.worker import WorkerServer
from serving.messages import ledger_to_wire, requests_of

DETECT_S = 0.02  # until a closed connection is noticed
CLOSED = object()  # what is read when nothing more will come
DELAY_S = 0.3  # of what is delayed on purpose


def _now() -> float:
    return asyncio.get_running_loop().time()


class Process:
    """What a worker shares with the outside, and whether it lives and moves."""

    def __init__(self, address: str, model: PagedModel, leases: Leases) -> None:
        self.address, self.model, self.leases = address, model, leases
        self.died = asyncio.Event()
        self._frozen_until = 0.0

    @property
    def is_dead(self) -> bool:
        return self.died.is_set()

    @property
    def frozen_s(self) -> float:
        """For so long it will not move."""
        return self._frozen_until - _now()

    def die(self) -> None:
        self.died.set()

    def freeze(self, seconds: float) -> None:
        self._frozen_until = _now() + seconds

    async def moves(self) -> None:
        while self.frozen_s > 0:
            await asyncio.sleep(self.frozen_s)


class Meddler:
    """Drops, repeats, delays or breaks the next message about one request; or holds up all."""

    def __init__(self) -> None:
        self._kind = ""
        self._request = ""
        self._held_until = 0.0

    def arm(self, kind: str, request: str) -> None:
        self._kind, self._request = kind, request

    def disarm(self) -> bool:
        """Whether it had not struck yet."""
        was_armed, self._kind = bool(self._kind), ""
        return was_armed

    def hold(self, seconds: float) -> None:
        """The gateway hears and says nothing for a while."""
        self._held_until = _now() + seconds

    async def through(self, message: Any) -> list[Any]:
        """What arrives instead. ConnectionError: it cannot be read, and the stream is over."""
        while _now() < self._held_until:
            await asyncio.sleep(self._held_until - _now())
        if not self._kind or not is_about(message, self._request):
            return [message]
        kind, self._kind = self._kind, ""
        match kind:
            case "drop":
                return []
            case "duplicate":
                return [message, message]
            case "delay":
                await asyncio.sleep(DELAY_S)
            case "corrupt":
                raise ConnectionError("a message that cannot be read")
        return [message]


def is_about(message: Any, request: str) -> bool:
    """A request, or one of its later hops."""
    return any(name.split("~")[0] == request for name in requests_of(message))


class Wire:
    """A connection between the gateway and one worker; ``serving.channel.gateway.Connection``."""

    def __init__(
        self,
        server: WorkerServer,
        process: Process | None,
        commands: AsyncIterator[Any],
        latency_s: float,
        meddler: Meddler,
    ) -> None:
        self._server, self._process, self._commands = server, process, commands
        self._latency_s, self._meddler = latency_s, meddler
        self._down: asyncio.Queue[Any] = asyncio.Queue()
        self._up: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Wire":
        if self._process is None or self._process.is_dead:
            await asyncio.sleep(DETECT_S)
            raise TimeoutError("nobody listens there")
        carriers = (self._carry_down(), self._carry_up(), self._notice_death(self._process))
        self._tasks = [asyncio.create_task(carrier) for carrier in carriers]
        return self

    async def __aexit__(self, *_: object) -> None:
        """The worker's end hears of it as soon as it moves."""
        for task in self._tasks[1:]:
            task.cancel()
        self._tasks[0].cancel()
        self._down.put_nowait(CLOSED)

    async def read(self) -> Any:
        return await self._up.get()

    async def ledger(self) -> Any:
        return ledger_to_wire(self._server._engine.ledger())

    async def _carry_down(self) -> None:
        try:
            async for command in self._commands:
                await asyncio.sleep(self._latency_s)
                for message in await self._meddler.through(command):
                    self._down.put_nowait(_copy(message))
        except ConnectionError:
            self._down.put_nowait(CLOSED)

    async def _carry_up(self) -> None:
        assert self._process is not None
        events = self._server.Attach(self._heard(), None)  # type: ignore[arg-type]
        try:
            async for event in events:
                await self._process.moves()
                await asyncio.sleep(self._latency_s)
                for message in await self._meddler.through(event):
                    self._up.put_nowait(_copy(message))
        except ConnectionError:
            pass
        finally:
            self._up.put_nowait(CLOSED)
            await self._process.moves()
            await events.aclose()  # type: ignore[attr-defined]

    async def _heard(self) -> AsyncIterator[Any]:
        assert self._process is not None
        while (command := await self._down.get()) is not CLOSED:
            await self._process.moves()
            yield command

    async def _notice_death(self, process: Process) -> None:
        await process.died.wait()
        await asyncio.sleep(DETECT_S)
        for task in self._tasks[:2]:
            task.cancel()
        self._up.put_nowait(CLOSED)


def _copy(message: Any) -> Any:
    """The ends share nothing but bytes."""
    return type(message).FromString(message.SerializeToString())


class PageWire:
    """Pages between processes, as ``kvtransfer.collective`` brings them: copied out under a pin,
    carried, checked, stored. A fault strikes the next ones that are carried."""

    def __init__(self, latency_s: float, page_s: float, timeout_s: float) -> None:
        self._latency_s, self._page_s, self._timeout_s = latency_s, page_s, timeout_s
        self._processes: dict[str, Process] = {}
        self._fault = ""
        self.carried: set[str] = set()  # requests whose pages are on their way
        self.landed: set[str] = set()  # here, and the engine does not know yet

    def arm(self, kind: str) -> None:
        self._fault = kind

    def disarm(self) -> bool:
        """Whether it had not struck yet."""
        was_armed, self._fault = bool(self._fault), ""
        return was_armed

    def join(self, process: Process) -> None:
        self._processes[process.address] = process

    def find(self, handle: KVHandle) -> Process | None:
        """The holder of the lease, while it lives."""
        process = self._processes[handle.source]
        return None if process.is_dead else process

    def release(self, handle: KVHandle) -> None:
        process = self.find(handle)
        if process is not None:
            process.leases.release(handle.request_id)

    async def bring(
        self, target: Process, handle: KVHandle, pages: Sequence[int], skip: int
    ) -> None:
        """TransferError; afterwards nothing is written to ``pages`` any more."""
        deadline = _now() + self._timeout_s
        if pages:
            source = await self._reach(handle, deadline)
            leased = source.leases.begin_send(handle.request_id)
            if leased is None:
                raise TransferError(f"no lease for {handle.request_id}")
            records = _read(source, leased[skip:])
            source.leases.end_send(handle.request_id, leased)
            await self._store(target, handle, records, pages, deadline)
        await self._let_go(handle)

    async def bring_early(
        self, target: Process, handle: KVHandle, pages: Sequence[int], skip: int
    ) -> Landing:
        have = skip
        while True:
            source = await self._reach(handle, _now() + self._timeout_s)
            waiting = asyncio.wrap_future(source.leases.ready(handle.request_id, have))
            try:
                ready = await asyncio.wait_for(waiting, self._timeout_s)
            except TimeoutError:
                raise TransferError(f"{handle.request_id} makes no progress") from None
            if ready is None:
                raise TransferError(f"{handle.request_id} is promised no longer")
            heard_at = _now()
            if ready.num_pages > have:
                part = pages[have - skip : ready.num_pages - skip]
                await self._bring_part(target, handle, part, have, ready.num_pages)
            have = ready.num_pages
            if ready.is_complete:
                await self._let_go(handle)
                return Landing(ready.token, _now() - heard_at)

    async def _bring_part(
        self, target: Process, handle: KVHandle, pages: Sequence[int], first: int, stop: int
    ) -> None:
        deadline = _now() + self._timeout_s
        source = await self._reach(handle, deadline)
        name, leases = handle.request_id, source.leases
        leased = leases.begin_send(name)
        theirs = leased[:stop] if leased is not None else leases.peek(name, stop)
        if theirs is None:
            raise TransferError(f"no lease for {name}")
        records = _read(source, theirs[first:])
        if leased is not None:
            leases.end_send(name, leased)
        elif not leases.holds(name, theirs):
            raise TransferError(f"{name} was revoked while it was copied")
        await self._store(target, handle, records, pages, deadline)

    async def _reach(self, handle: KVHandle, deadline: float) -> Process:
        """The source, after a message to it."""
        await asyncio.sleep(self._latency_s)
        source = self.find(handle)
        if source is None:
            await asyncio.sleep(DETECT_S)
            raise TransferError(f"nobody at {handle.source}")
        await self._while_frozen(source, deadline)
        return source

    async def _while_frozen(self, process: Process, deadline: float) -> None:
        if process.frozen_s > deadline - _now():
            await asyncio.sleep(max(0.0, deadline - _now()))
            raise TransferError("timed out")
        await process.moves()

    async def _store(
        self,
        target: Process,
        handle: KVHandle,
        records: list["array[int]"],
        pages: Sequence[int],
        deadline: float,
    ) -> None:
        name = handle.request_id
        self.carried.add(name)
        try:
            await self._carry(handle, len(records), deadline)
        finally:
            self.carried.discard(name)
        await target.moves()
        if _now() > deadline:
            raise TransferError("timed out")
        for page, record in zip(pages, records, strict=True):
            target.model.pages[page] = record
        self.landed.add(name)
        await asyncio.sleep(self._latency_s)
        self.landed.discard(name)

    async def _carry(self, handle: KVHandle, num_pages: int, deadline: float) -> None:
        kind = await self._strike(handle, num_pages, deadline)
        await asyncio.sleep(self._page_s * num_pages / 2)
        source = self._processes[handle.source]
        if source.is_dead:
            await asyncio.sleep(DETECT_S)
            raise TransferError("connection closed by peer")
        await self._while_frozen(source, deadline)
        if kind == "corrupt":
            raise TransferError("arrived with a wrong checksum")

    async def _strike(self, handle: KVHandle, num_pages: int, deadline: float) -> str:
        """Half of the way, and what happens there."""
        await asyncio.sleep(self._page_s * num_pages / 2)
        kind, self._fault = self._fault, ""
        if kind == "drop":
            await asyncio.sleep(max(0.0, deadline - _now()))
            raise TransferError("timed out before the next piece")
        if kind == "delay":
            await asyncio.sleep(DELAY_S)
        if kind == "duplicate":  # a release that comes before its time, and once more after it
            self.release(handle)
        return kind

    async def _let_go(self, handle: KVHandle) -> None:
        await asyncio.sleep(self._latency_s)
        self.release(handle)


def _read(source: Process, pages: Sequence[int]) -> list["array[int]"]:
    return [array("I", source.model.pages[page]) for page in pages]
