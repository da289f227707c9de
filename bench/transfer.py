"""What it costs to move pages between two processes, beside the raw transport under it.

It knows pages and bytes, and no engine: one process leases pages, this one fetches them. Raw is
torch.distributed's Gloo between the same two processes, nothing copied, checked or agreed on;
rounds of both take turns, so that whatever else the machine does strikes both.
"""

import asyncio
import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed

from bench.report import percentile
from kvtransfer.collective import CollectiveTransport
from kvtransfer.control import add_pages_service
from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.leases import Leases
from serving.channel.worker import WorkerServer
from workers.kvcache import KVCache

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians of one transfer of so many bytes."""

    num_bytes: int
    raw_s: float
    fetch_s: float  # asked for, copied out, sent, checked and in place


class _Side:
    """A pool of pages, its leases and its transport."""

    def __init__(self, layout: KVLayout, num_pages: int, name: str) -> None:
        torch.set_num_threads(1)
        self.layout, self.name = layout, name
        self.pool = KVCache(layout, num_pages, CPU).pool
        with torch.inference_mode():
            self.pool.normal_()
        self.leases = Leases(TIMEOUT_S)
        self.transport = CollectiveTransport(
            self.pool,
            layout,
            self.leases,
            host=HOST,
            incarnation=name,
            device=CPU,
            timeout_s=TIMEOUT_S,
        )

    def lease(self, address: str, name: str, num_pages: int) -> KVHandle:
        """Of pages in no order, as in a pool that has served for a while."""
        self.leases.take_free()
        pages = random.Random(name).sample(range(self.pool.shape[0]), num_pages)
        num_tokens = num_pages * self.layout.page_size
        self.leases.grant(name, pages, num_tokens)
        return KVHandle(name, address, self.name, num_tokens, num_pages, self.layout)


def _source(pipe: Connection, layout: KVLayout, num_pages: int, store: str) -> None:
    """Does what it is told: lease so many pages, or send so many bytes."""
    side = _Side(layout, num_pages, "source")
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    serve = asyncio.run_coroutine_threadsafe(_serve(side), loop)
    worker, address = serve.result(TIMEOUT_S)
    _join(0, store)
    pipe.send(address)
    buffer = torch.zeros(0, dtype=torch.uint8)
    while (order := pipe.recv()) is not None:
        name, number = order
        if name == "send":
            if buffer.numel() < number:
                buffer = torch.zeros(number, dtype=torch.uint8)
            distributed.barrier()
            distributed.send(buffer[:number], 1)
        else:
            pipe.send(side.lease(address, name, number))
    asyncio.run_coroutine_threadsafe(worker.stop(), loop).result(TIMEOUT_S)


async def _serve(side: _Side) -> tuple[WorkerServer, str]:
    worker = WorkerServer()
    address = await worker.bind(HOST)
    add_pages_service(worker.server, side.transport.endpoint)
    await worker.server.start()
    return worker, address


def _join(rank: int, store: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


class Road:
    """Between this process and a source: ``open_road`` makes one."""

    def __init__(self, pipe: Connection, layout: KVLayout, num_pages: int, store: str) -> None:
        self._pipe, self._layout = pipe, layout
        self._side = _Side(layout, num_pages, "target")
        self._num = 0
        self._buffer = torch.zeros(0, dtype=torch.uint8)
        _join(1, store)
        pipe.recv()  # it is up

    def measure(self, num_pages: int, rounds: int) -> Cost:
        """The first round of each kind, which opens the pair, does not count."""
        num_bytes = num_pages * self._layout.page_bytes
        times = [(self._raw_s(num_bytes), self._fetch_s(num_pages)) for _ in range(rounds + 1)][1:]
        raw_s, fetch_s = (percentile(kind, 50) for kind in zip(*times, strict=True))
        return Cost(num_bytes, raw_s, fetch_s)

    def _raw_s(self, num_bytes: int) -> float:
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self._pipe.send(("send", num_bytes))
        distributed.barrier()
        start = time.perf_counter()
        distributed.recv(self._buffer[:num_bytes], 0)
        return time.perf_counter() - start

    def _fetch_s(self, num_pages: int) -> float:
        self._num += 1
        self._pipe.send((f"fetch-{self._num}", num_pages))
        handle = self._pipe.recv()
        pages = random.Random(self._num).sample(range(self._side.pool.shape[0]), num_pages)
        start = time.perf_counter()
        self._side.transport.fetch(handle, pages, TIMEOUT_S)
        return time.perf_counter() - start

    def close(self) -> None:
        self._pipe.send(None)
        self._side.transport.close()
        distributed.destroy_process_group()


@contextmanager
def open_road(layout: KVLayout, num_pages: int) -> Iterator[Road]:
    """Pools of so many pages at both ends."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        process = context.Process(target=_source, args=(there, layout, num_pages, store))
        process.start()
        try:
            road = Road(here, layout, num_pages, store)
            yield road
            road.close()
        finally:
            process.join(5)
            process.kill()
