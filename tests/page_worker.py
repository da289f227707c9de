"""A worker's KV transfer side without an engine, in this process or in one of its own."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch

from kvtransfer.collective import CollectiveTransport
from kvtransfer.control import add_pages_service
from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.deadline import Deadline
from kvtransfer.leases import Leases
from kvtransfer.pair import Pair
from kvtransfer.source import Cargo, PageSource
from kvtransfer.staging import Piece
from kvtransfer.transport import TransferError

HOST = "127.0.0.1"


class FlippedBit(PageSource):
    """Sends something else than it hashed."""

    def _send(self, pair: Pair, pieces: Iterable[Piece], transfer: int, deadline: Deadline) -> None:
        sent = list(pieces)
        wire = sent[len(sent) // 2].wire
        wire[wire.numel() // 2] ^= 4
        pair.send(sent, transfer, deadline)


class SignalledHalfWay(PageSource):
    """Its process gets a signal when half of the pieces of the first transfer are away."""

    signal: signal.Signals
    is_armed = True

    def _send(self, pair: Pair, pieces: Iterable[Piece], transfer: int, deadline: Deadline) -> None:
        pair.send(self._to_half_way(list(pieces)), transfer, deadline)

    def _to_half_way(self, pieces: list[Piece]) -> Iterator[Piece]:
        for i, piece in enumerate(pieces):
            if self.is_armed and i == len(pieces) // 2:
                self.is_armed = False
                os.kill(os.getpid(), self.signal)
                time.sleep(0.05)  # the signal is on its way to the process
            yield piece


class KilledHalfWay(SignalledHalfWay):
    signal = signal.SIGKILL


class StoppedHalfWay(SignalledHalfWay):
    signal = signal.SIGSTOP


class Slow(PageSource):
    def _send(self, pair: Pair, pieces: Iterable[Piece], transfer: int, deadline: Deadline) -> None:
        time.sleep(1.0)
        pair.send(pieces, transfer, deadline)


class SlowToLoad(PageSource):
    """Takes its time from the moment when it is too late to refuse."""

    load_s = 0.0

    def _load(self, *args: Any) -> AbstractContextManager[Cargo]:
        time.sleep(self.load_s)
        return super()._load(*args)


class Forgetful(PageSource):
    """Announces its first transfer, and never sends it."""

    has_forgotten = False

    def _send(self, pair: Pair, pieces: Iterable[Piece], transfer: int, deadline: Deadline) -> None:
        if self.has_forgotten:
            return super()._send(pair, pieces, transfer, deadline)
        self.has_forgotten = True
        time.sleep(max(0.0, deadline.at - time.monotonic()))
        raise TransferError("dropped on purpose")


class Counting(PageSource):
    """Knows how often it was asked to send."""

    num_asked = 0

    def send(self, request: Any) -> Any:
        self.num_asked += 1
        return super().send(request)


class PageWorker:
    """A pool, its leases, a control server on a loop of its own, and the transport."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        incarnation: str,
        source: type[PageSource] = PageSource,
        max_pairs: int = 16,
    ) -> None:
        self.layout = layout
        self.incarnation = incarnation
        shape = (num_pages, layout.num_layers, layout.num_kv_heads, 2, layout.page_size)
        self.pool = torch.zeros(*shape, layout.head_dim, dtype=getattr(torch, layout.dtype))
        self.leases = Leases(lease_s=10)
        common: dict[str, Any] = dict(
            host=HOST,
            incarnation=incarnation,
            device=torch.device("cpu"),
            timeout_s=2.0,
            max_pairs=max_pairs,
        )
        self.transport = CollectiveTransport(self.pool, layout, self.leases, **common)
        self.endpoint = source(self.pool, layout, self.leases, **common)
        self._leased: set[int] = set()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server, self.address = self._on_loop(self._serve())

    async def _serve(self) -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server()
        add_pages_service(server, self.endpoint)
        port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        return server, f"{HOST}:{port}"

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        bits = self.pool.view(torch.uint8)
        bits.copy_(torch.randint(0, 120, bits.shape, generator=generator, dtype=torch.uint8))

    def lease(self, request_id: str, pages: Sequence[int]) -> KVHandle:
        num_tokens = len(pages) * self.layout.page_size
        with self._lock:
            self._wait_until_free(set(pages))
            self.leases.grant(request_id, list(pages), num_tokens)
        return KVHandle(
            request_id, self.address, self.incarnation, num_tokens, len(pages), self.layout
        )

    def _wait_until_free(self, pages: set[int]) -> None:
        """The last receiver's release of them may still be on its way."""
        deadline = time.monotonic() + 5
        while True:
            self._leased.difference_update(self.leases.take_free())
            if self._leased.isdisjoint(pages):
                break
            assert time.monotonic() < deadline, f"{pages} do not come free"
            time.sleep(0.002)
        self._leased.update(pages)

    def fetch(self, handle: KVHandle, pages: Sequence[int], timeout_s: float = 10.0) -> None:
        self.transport.fetch(handle, pages, timeout_s)

    def read(self, pages: Sequence[int]) -> bytes:
        return self.pool[list(pages)].view(torch.uint8).numpy().tobytes()

    def held(self) -> dict[str, int]:
        return self.leases.held()

    def close(self) -> None:
        self.transport.close()
        self.endpoint.close()
        self._on_loop(self.server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)


class RemoteWorker:
    """A PageWorker in a process of its own: ``remote.call("fetch", ...)``."""

    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self._lock = threading.Lock()

    def call(self, name: str, *args: Any) -> Any:
        with self._lock:
            self._pipe.send((name, args))
            assert self._pipe.poll(60), f"no answer to {name}"
            result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def soon(self, name: str, *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self.call(name, *args))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self._pipe.close()


def _run(pipe: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    worker = PageWorker(*args)
    while True:
        name, arguments = pipe.recv()
        method: Callable[..., Any] = getattr(worker, name)
        try:
            pipe.send(method(*arguments))
        except Exception as error:
            pipe.send(error)
