"""The three processes of ``bench.front``: a worker of the FAKE model, Evenflow's front door, and a
bare uvicorn that plays back what the front door has sent.

    parent: client ◄── HTTP ── front door ◄── Worker.Attach ── worker (FAKE)
                   ◄── HTTP ── bare server

Each is told what to do over a pipe, and answers with what it has seen.
"""

import asyncio
import gc
import multiprocessing
import socket
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvtransfer.core.handle import KVLayout
from kvtransfer.leases import Leases
from serving.channel.worker import Identity, WorkerServer
from serving.config import Config, TlsConfig
from serving.front import FrontDoor
from serving.http_server import HttpServer
from serving.tokenizer import Tokenizer
from workers.core.output import Report, Token
from workers.core.pages import PagePool
from workers.core.plan import Chunk
from workers.core.policy import Limits
from workers.core.scheduler import Scheduler
from workers.engine import Engine, Source
from workers.fake import FakeRunner

STEP_S = 0.020
PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN = 16, 40_960, 8192
PATIENCE_S = 60.0
LAYOUT = KVLayout("fake", 1, 1, 4, PAGE_SIZE, "float32")
Schedule = list[tuple[float, dict[str, bytes]]]  # seconds from the start, and who gets what


class Process:
    """One side, in a process of its own until ``stop``."""

    def __init__(self, target: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_enter, args=(target, theirs, *arguments))
        self._process.start()
        self.told = self.answer()  # an address, and the thread that is not counted

    def ask(self, question: Any) -> Any:
        self._pipe.send(question)
        return self.answer()

    def answer(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            raise SystemExit("a process of the benchmark says nothing")
        return self._pipe.recv()

    def cpu_s(self, but: int = 0) -> float:
        """What its threads have used so far, without the one of that number."""
        used = 0
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            if task.name != str(but):
                used += int((task / "schedstat").read_text().split()[0])
        return used / 1e9

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


def _enter(target: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
    gc.freeze()  # as replicas do
    uvloop.run(target(*arguments))


class PlainRunner(FakeRunner):
    """FAKE with tokens that are whole text each, so that every token is one event."""

    def __init__(self, plain: list[int], step_s: float) -> None:
        super().__init__(step_s=step_s)
        self._plain = plain

    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]:
        tokens, plain = super().run(chunks), self._plain
        return {name: Token(plain[token.id % len(plain)]) for name, token in tokens.items()}


def _plain_tokens(tokenizer: Tokenizer) -> list[int]:
    ids = range(tokenizer.vocab_size)
    plain = [i for i in ids if tokenizer.token_bytes(i).isalpha()]
    return [i for i in plain if i not in tokenizer.eos_ids]


async def worker(pipe: Connection, folder: Path, num_seqs: int) -> None:
    """One engine. Asked for anything, it tells when it emitted each token of each request."""
    runner = PlainRunner(_plain_tokens(Tokenizer.load(folder)), STEP_S)
    server = WorkerServer()
    emitted: defaultdict[str, list[float]] = defaultdict(list)

    def emit(report: Report) -> None:
        now = time.monotonic()
        for output in report.outputs:
            if output.token is not None:
                emitted[output.request_id].append(now)
        server.emit(report)

    address = await server.bind("127.0.0.1")
    engine = Engine(
        runner,
        Scheduler(Limits(2048, num_seqs), PagePool(NUM_PAGES, PAGE_SIZE)),
        Leases(lease_s=5.0),
        None,
        Source(address, "fake", LAYOUT),
        emit=emit,
    )
    engine.start()
    numbers = (MAX_MODEL_LEN, NUM_PAGES, PAGE_SIZE, runner.vocab_size)
    await server.start(engine, Identity("fake", "fake", "mixed", *numbers))
    thread = next(t.native_id for t in threading.enumerate() if t.name == "engine")
    pipe.send((address, thread))
    while await asyncio.to_thread(pipe.recv):
        pipe.send(dict(emitted))
        emitted.clear()


async def front_door(pipe: Connection, folder: Path, address: str, name: str) -> None:
    """Evenflow as it is. Tells its ports once it has the worker."""
    config = Config(served_model_name=name, http_port=0, grpc_port=0)
    front = FrontDoor(config, folder)
    await front.start()
    front.update({"fake": address})
    while not front.gateway.is_ready:
        await asyncio.sleep(0.01)
    pipe.send((front.http_port, front.grpc_port))
    await asyncio.Event().wait()


async def bare(pipe: Connection) -> None:
    """uvicorn and a StreamingResponse. It is given a schedule, starts with it once all of its
    streams are there, and tells when it sent what."""
    streams: dict[str, asyncio.Queue[bytes | None]] = {}

    async def events(stream: "asyncio.Queue[bytes | None]") -> AsyncIterator[bytes]:
        while (event := await stream.get()) is not None:
            yield event

    async def answer(request: Request) -> Response:
        await request.body()
        stream = streams[request.headers["x-request-id"]] = asyncio.Queue()
        return StreamingResponse(events(stream), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    server = HttpServer(app, TlsConfig())
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.create_task(server.serve(sockets=[sock]))
        pipe.send((sock.getsockname()[1], 0))
        while not task.done():
            schedule = await asyncio.to_thread(pipe.recv)
            pipe.send(await _play(schedule, streams))
            streams.clear()


async def _play(
    schedule: Schedule, streams: "dict[str, asyncio.Queue[bytes | None]]"
) -> dict[str, list[float]]:
    names = {name for _, batch in schedule for name in batch}
    while not names <= streams.keys():
        await asyncio.sleep(0.01)
    emitted: dict[str, list[float]] = {name: [] for name in names}
    start = time.monotonic()
    for at_s, batch in schedule:
        await asyncio.sleep(max(0.0, start + at_s - time.monotonic()))
        now = time.monotonic()
        for name, event in batch.items():
            streams[name].put_nowait(event)
            emitted[name].append(now)
    for name in names:
        streams[name].put_nowait(None)
    return emitted
