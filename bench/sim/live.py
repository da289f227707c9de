"""The live gateway and live workers in virtual time, on one loop, without sockets and threads.

Gateway, moves, channels, engine, scheduler, leases and promises are the ones that serve. Made up
are the model (``bench/sim/paged.py``), the wires (``bench/sim/wires.py``) and the time that things
take. A worker can be killed, frozen and started again; what goes over wires can be meddled with.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.sim.paged import VOCAB, PagedModel
from bench.sim.wires import Meddler, PageWire, Process, Wire
from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.leases import Leases
from kvtransfer.transport import Landing, TransferError
from serving.channel.gateway import ChannelPools
from serving.channel.worker import Identity, WorkerServer
from serving.gateway import Gateway
from serving.tokenizer import Tokenizer
from workers.core.output import KVLedger
from workers.core.pages import PagePool
from workers.core.plan import Fetched
from workers.core.policy import Limits
from workers.core.request import Sequence
from workers.core.scheduler import Scheduler
from workers.engine import IDLE_S, Engine, Source

LAYOUT = KVLayout("paged", num_layers=1, num_kv_heads=1, head_dim=1, page_size=16, dtype="float32")
ROLES = {"p": "prefill", "d": "decode", "spare": "mixed"}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that things take."""

    step_s: float = 0.010
    latency_s: float = 0.001  # of one message
    page_s: float = 0.001  # on the wire
    lease_s: float = 3.0
    transfer_timeout_s: float = 1.0
    stall_timeout_s: float = 2.0
    restart_s: float = 0.5


class VirtualTransport:
    """Where an engine lets go of a lease elsewhere. Pages are brought by ``PageWire``."""

    def __init__(self, wire: PageWire) -> None:
        self._wire = wire

    def renew(self, handle: KVHandle) -> bool:
        source = self._wire.find(handle)
        return source is not None and source.leases.renew(handle.request_id)

    def release(self, handle: KVHandle) -> None:
        self._wire.release(handle)

    def fetch(self, *_: object) -> None:
        raise AssertionError("a virtual engine fetches by itself")

    fetch_early = fetch

    def close(self) -> None:
        """There is no connection."""


class _Soon:
    """Stands where an engine has threads."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def submit(self, work: Callable[..., object], *args: object) -> None:
        asyncio.get_running_loop().call_later(self._delay_s, work, *args)


class VirtualEngine(Engine):
    """The live engine. Its turns are events of the loop, its fetches tasks."""

    def __init__(self, process: Process, wire: PageWire, timing: Timing, **parts: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._process, self._wire, self._times = process, wire, timing
        self._next_turn: asyncio.TimerHandle | None = None
        self._busy_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(
            clock=self._loop.time, transfer_timeout_s=timing.transfer_timeout_s, **parts
        )
        self._fetchers = self._early = _Soon(0.0)  # type: ignore[assignment]
        self._notes = _Soon(timing.latency_s)  # type: ignore[assignment]

    def start(self) -> None:
        self._soon()

    def ledger(self, timeout_s: float = 5.0) -> KVLedger:
        return self._take_stock()

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def _tell(self, command: Callable[[], None]) -> None:
        super()._tell(command)
        self._soon()

    def _wake(self) -> None:
        super()._wake()
        self._soon()

    def _wait(self) -> None:
        """Whoever has something to say calls ``_soon``."""

    def _soon(self, pause_s: float = 0.0) -> None:
        when = max(self._loop.time() + pause_s, self._busy_until)
        if self._next_turn is not None:
            if self._next_turn.when() <= when:
                return
            self._next_turn.cancel()
        self._next_turn = self._loop.call_at(when, self._take_turn)

    def _take_turn(self) -> None:
        self._next_turn = None
        if self._process.is_dead:
            return
        if self._process.frozen_s > 0:
            self._soon(self._process.frozen_s)
            return
        steps = self._steps
        self._turn()
        if self._steps > steps:
            self._busy_until = self._loop.time() + self._times.step_s
        self._soon(IDLE_S if self._steps == steps else 0.0)

    def _fetch(self, seq: Sequence) -> None:
        task = self._loop.create_task(self._bring(seq))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring(self, seq: Sequence) -> None:
        assert seq.handle is not None, "only a sequence with a handle is fetched"
        is_early, failure, started = seq.is_early, None, self._loop.time()
        landing: Landing | None = None
        skip = seq.num_cached // self._scheduler.pool.page_size
        pages = seq.pages[skip : seq.handle.num_pages]
        try:
            if is_early:
                landing = await self._wire.bring_early(self._process, seq.handle, pages, skip)
            else:
                await self._wire.bring(self._process, seq.handle, pages, skip)
        except TransferError as error:
            failure = f"TransferError: {error}"
        token = None if landing is None else landing.token
        took_s = self._loop.time() - started if landing is None else landing.took_s
        num_bytes = len(pages) * seq.handle.layout.page_bytes
        fetched = Fetched(is_early, failure, token, num_bytes, took_s)
        self._inbox.put(lambda: self._fetch_ended(seq, fetched))
        self._soon()


class Worker:
    """One life of one worker."""

    def __init__(
        self,
        name: str,
        role: str,
        life: int,
        wire: PageWire,
        timing: Timing,
        *,
        limits: Limits,
        num_pages: int,
        prefix_caching: bool,
    ) -> None:
        self.name, self.address = name, f"{name}:{life}"
        loop = asyncio.get_running_loop()
        model = PagedModel(num_pages, LAYOUT.page_size)
        leases = Leases(timing.lease_s, clock=loop.time)
        self.process = Process(self.address, model, leases)
        wire.join(self.process)
        self.server = WorkerServer(debug=True, clock=loop.time)
        pool = PagePool(num_pages, LAYOUT.page_size)
        self.engine = VirtualEngine(
            self.process,
            wire,
            timing,
            executor=model,
            scheduler=Scheduler(limits, pool, prefix_caching=prefix_caching),
            leases=leases,
            transport=VirtualTransport(wire),
            source=Source(self.address, self.address, LAYOUT),
            emit=self.server.emit,
        )
        self.server.attend(
            self.engine, Identity(name, self.address, role, 4096, num_pages, 16, VOCAB)
        )
        self.engine.start()


class LiveCluster:
    """A prefill, a decode and a spare worker, and a gateway. Use it inside ``loop.run``."""

    def __init__(
        self,
        timing: Timing,
        *,
        limits: dict[str, Limits] | None = None,
        num_pages: int = 256,
        prefix_caching: bool = True,
        early_fetch: bool = True,
        store: Any = None,
    ) -> None:
        self.timing = timing
        self.meddler = Meddler()
        self.pages = PageWire(timing.latency_s, timing.page_s, timing.transfer_timeout_s)
        self._num_pages, self._prefix_caching = num_pages, prefix_caching
        self._limits = limits or {}
        self.workers: dict[str, Worker] = {}
        self._lives = dict.fromkeys(ROLES, 0)
        loop = asyncio.get_running_loop()
        self.pools = ChannelPools(
            stall_timeout_s=timing.stall_timeout_s, connect=self._connect, clock=loop.time
        )
        for name in ROLES:
            self._start(name)
        self.gateway = Gateway(
            self.pools,
            tokenizer(),
            model="paged",
            early_fetch=early_fetch,
            clock=loop.time,
            store=store,
        )

    async def ready(self) -> None:
        """Everybody is attached and takes requests."""
        async with asyncio.timeout(60):
            while {v.id for v in self.pools.workers() if not v.is_leaving} != set(ROLES):
                await asyncio.sleep(0.01)

    def kill(self, name: str) -> None:
        """At once; a successor comes a while later, as Ray brings one."""
        self.workers[name].process.die()
        loop = asyncio.get_running_loop()
        loop.call_later(self.timing.restart_s, self._start, name)

    def freeze(self, name: str, seconds: float) -> None:
        self.workers[name].process.freeze(seconds)

    async def until_clean(self, timeout_s: float) -> None:
        """No page is owned or leased on any worker that lives. TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not all(w.engine.ledger().is_clean for w in self.workers.values()):
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.pools.close()
        for worker in self.workers.values():
            worker.process.die()
            await worker.server.rest()

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        limits = self._limits.get(name, Limits(64, 8))
        self.workers[name] = Worker(
            name,
            ROLES[name],
            self._lives[name],
            self.pages,
            self.timing,
            limits=limits,
            num_pages=self._num_pages,
            prefix_caching=self._prefix_caching,
        )
        self.pools.update({worker.name: worker.address for worker in self.workers.values()})

    def _connect(self, address: str, commands: Any, token: str) -> Wire:
        worker = self.workers[address.split(":")[0]]
        process = worker.process if worker.address == address else None
        return Wire(worker.server, process, commands, self.timing.latency_s, self.meddler)


@cache
def tokenizer() -> Tokenizer:
    """One visible character per token."""
    characters = {chr(33 + i): i for i in range(VOCAB)}
    model = {"type": "BPE", "vocab": characters, "merges": []}
    empty = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
    decoder = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), True)
    spec: dict[str, Any] = {
        "version": "1.0",
        **empty,
        "added_tokens": [],
        "decoder": {"type": "ByteLevel", **decoder},
        "model": model,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(spec))
        return Tokenizer.load(folder)
