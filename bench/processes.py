"""A few worker processes of one model, without Ray, and a gateway in this one. Each can be killed,
stopped and started again, and what the gateway and they tell each other can be meddled with."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bench.sim.wires import CLOSED, Meddler
from serving.channel.gateway import ChannelPools, over_grpc
from serving.config import Config, Role
from serving.errors import NotFound, Unavailable
from serving.gateway import Gateway
from serving.pools import WorkerLost
from serving.state import MemoryStore, StateStore
from serving.tokenizer import Tokenizer

PATIENCE_S = 120.0  # for a worker to start, or for pages to come home
SMALL = Config(
    dtype="float32",
    num_pages=256,
    threads=1,
    max_num_batched_tokens=64,
    debug=True,
    lease_s=3.0,
    transfer_timeout_s=1.0,
    stall_timeout_s=4.0,
    prefix_caching=False,
)


def _serve(pipe: Connection, folder: Path, name: str, role: Role, config: Config) -> None:
    from serving.deployments.worker import WorkerProcess  # torch, in this process alone

    async def run() -> None:
        worker = WorkerProcess(config, name, role)
        await worker.start(folder)
        pipe.send(worker.address)
        await asyncio.Event().wait()

    asyncio.run(run())


class Cluster:
    """``mend`` starts what is not there, and replaces what was broken."""

    def __init__(self, folder: Path, roles: dict[str, Role], config: Config = SMALL) -> None:
        self.meddler = Meddler()
        self.watch: Callable[[Any], None] = lambda message: None  # sees each one before it passes
        self.roles = roles
        self._folder, self.config = folder, config
        self.pools = ChannelPools(stall_timeout_s=config.stall_timeout_s, connect=self._connect)
        self._tokenizer = Tokenizer.load(folder)
        self.gateway = self.new_gateway(MemoryStore())
        self._processes: dict[str, BaseProcess] = {}
        self._addresses: dict[str, str] = {}
        self._configs: dict[str, Config] = {}

    def new_gateway(self, store: StateStore) -> Gateway:
        """Instead of the present one."""
        self.gateway = Gateway(self.pools, self._tokenizer, model="bench", store=store)
        return self.gateway

    async def mend(self, **configs: Config) -> None:
        """Everybody is there and takes requests; some by name with a configuration of their own."""
        for name in self.roles:
            config, process = configs.get(name, self.config), self._processes.get(name)
            if process is None or not process.is_alive() or self._configs[name] != config:
                await asyncio.to_thread(self._start, name, config)
        self.pools.update(self._addresses)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                views = {view.id: view for view in self.pools.workers()}
                if set(views) == set(self.roles) and not any(v.is_leaving for v in views.values()):
                    return
                for name in [name for name, view in views.items() if view.is_leaving]:
                    with contextlib.suppress(NotFound, Unavailable):
                        await self.gateway.moves.set_role(name, self.roles[name])
                await asyncio.sleep(0.1)

    def _start(self, name: str, config: Config) -> None:
        self.kill(name)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._folder, name, self.roles[name], config)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        if not ours.poll(PATIENCE_S):
            raise SystemExit(f"worker {name} does not start")
        self._processes[name], self._addresses[name] = process, ours.recv()
        self._configs[name] = config

    @asynccontextmanager
    async def _connect(
        self, address: str, commands: AsyncIterator[Any], token: str
    ) -> AsyncIterator["_Meddled"]:
        stream = _Meddled(self)
        async with over_grpc(address, stream.said(commands), token) as connection:
            stream.connection = connection
            yield stream

    def signal(self, name: str, signum: signal.Signals) -> None:
        process = self._processes[name]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signum)

    def kill(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None:
            process.kill()
            process.join()

    async def until_clean(self, timeout_s: float = PATIENCE_S) -> None:
        """No page is owned or leased on any worker. TimeoutError."""
        async with asyncio.timeout(timeout_s):
            for name in self.roles:
                with contextlib.suppress(WorkerLost):  # its pages went with it
                    while not (await self.pools.ledger(name)).is_clean:
                        await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self.pools.close()
        for name in self._processes:
            self.kill(name)


class _Meddled:
    """A stream to a worker that is watched and meddled with, both ways."""

    connection: Any

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._heard: list[Any] = []
        self._is_broken = False

    async def read(self) -> Any:
        while not self._heard and not self._is_broken:
            message = await self.connection.read()
            if not hasattr(message, "report"):
                return message
            self._heard += await self._through(message)
        return self._heard.pop(0) if self._heard else CLOSED

    async def ledger(self) -> Any:
        return await self.connection.ledger()

    async def said(self, commands: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for command in commands:
            for message in await self._through(command):
                yield message
            if self._is_broken:
                return

    async def _through(self, message: Any) -> list[Any]:
        self._cluster.watch(message)
        try:
            return await self._cluster.meddler.through(message)
        except ConnectionError:
            self._is_broken = True
            return []
