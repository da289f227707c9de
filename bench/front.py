"""What the front door costs: Evenflow over HTTP and gRPC beside a bare uvicorn that sends the same
bytes at the same times, and streams beside readers that have stopped.

    python -m bench.front                    # about 7 minutes
    python -m bench.front --seconds 5 --rounds 1 --parts cost

64 streams of the FAKE model, a step every 20 ms. The client notes when each event came, the engine
when it told its tokens; both are read from this machine's one monotonic clock. Prints tables and
writes ``bench/results/front.jsonl``.
"""

import argparse
import asyncio
import json
import re
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from bench.front_grpc import GrpcDoor, GrpcStream
from bench.front_sides import STEP_S, Process, Schedule, bare, front_door, worker
from bench.report import markdown, percentile, save

EVENT = re.compile(rb"data: \{.*?\}\n\n", re.DOTALL)
WARM_S = 1.5  # until every stream has begun
WARM_TOKENS = 200
BARE = "bare uvicorn"
MARGIN = 25  # tokens at each end of a stream that are not counted
SLOW = 8  # readers that stop
NAME_BYTES = 6000  # of a model's name, which is in each event
FULL_S = 11.0  # from the start: by then these have filled the sockets of those who do not read
Row = dict[str, object]
Times = dict[str, list[float]]


@dataclass(eq=False)
class Stream(asyncio.Protocol):
    """One completion, as it comes: pieces of bytes, and when. Nothing is parsed meanwhile."""

    name: str
    body: bytes
    keeps: bool = True  # what comes, not only when
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nx-request-id: {self.name}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(self.body)}\r\n\r\n"
        )
        transport.write(head.encode() + self.body)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data if self.keeps else data[-9:]))
        if data.endswith(b"0\r\n\r\n"):
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(exc)

    def events(self) -> list[tuple[float, bytes]]:
        """Each event with the time of the piece that completed it."""
        whole, ends, end = b"".join(data for _, data in self.pieces), [], 0
        for at, data in self.pieces:
            end += len(data)
            ends.append((end, at))
        found, piece = [], 0
        for match in EVENT.finditer(whole):
            while ends[piece][0] < match.end():
                piece += 1
            found.append((ends[piece][1], match[0]))
        return found


@dataclass(slots=True)
class Round:
    """What came of one turn of one side."""

    arrived: Times
    emitted: Times
    events: dict[str, list[bytes]]
    cpu_us: list[float]  # per token, of each process

    def delays_ms(self) -> list[float]:
        """From the engine's thread to the client, of every token but the first and last few."""
        return [
            1000 * (at - emitted)
            for name, times in self.arrived.items()
            for at, emitted in list(zip(times, self.emitted[name], strict=True))[MARGIN:-MARGIN]
        ]

    def gaps_ms(self) -> list[float]:
        return [
            1000 * (b - a)
            for times in self.arrived.values()
            for a, b in pairwise(times[MARGIN:-MARGIN])
        ]

    def schedule(self) -> Schedule:
        """The same bytes at the same times."""
        batches: defaultdict[float, dict[str, bytes]] = defaultdict(dict)
        for name, events in self.events.items():
            for at, event in zip(self.emitted[name], events, strict=True):
                batches[at][name] = event
        start = min(batches)
        return [(at - start, batches[at]) for at in sorted(batches)]


class HttpDoor:
    """``open`` begins a stream, on a connection of its own."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self, name: str, prompt: list[int], num_tokens: int) -> Stream:
        return await _open(self._port, Stream(name, _body(prompt, num_tokens)))


async def streams(
    door: HttpDoor | GrpcDoor,
    names: Sequence[str],
    num_tokens: int,
    processes: Sequence[tuple[Process, int]],
) -> tuple[dict[str, Stream | GrpcStream], list[float]]:
    """All of them, to their ends; CPU seconds per second of each process while all of them ran."""
    made = [await door.open(name, _prompt(name), num_tokens) for name in names]
    await asyncio.sleep(WARM_S)
    before, began = [process.cpu_s(but) for process, but in processes], time.monotonic()
    await asyncio.sleep(num_tokens * STEP_S - WARM_S - 2 * MARGIN * STEP_S)
    after, took_s = [process.cpu_s(but) for process, but in processes], time.monotonic() - began
    async with asyncio.timeout(60):
        await asyncio.gather(*(stream.ended for stream in made))
    used = [(b - a) / took_s for a, b in zip(before, after, strict=True)]
    return {stream.name: stream for stream in made}, used


async def _open(port: int, stream: Stream, room: int | None = None) -> Stream:
    """With ``room`` the kernel keeps no more than so many bytes that were not read."""
    sock, loop = socket.socket(), asyncio.get_running_loop()
    if room is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", port))
    await loop.create_connection(lambda: stream, sock=sock)
    return stream


def _prompt(name: str) -> list[int]:
    return [100 + byte for byte in name.encode()]


def _body(prompt: list[int], num_tokens: int) -> bytes:
    asked = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    return json.dumps(asked).encode()


async def turn(
    door: HttpDoor | GrpcDoor,
    teller: Process,
    names: Sequence[str],
    num_tokens: int,
    counted: Sequence[tuple[Process, int]],
    schedule: Schedule | None = None,
) -> Round:
    """One side's turn; ``teller`` knows when each token was emitted."""
    telling = None
    if schedule is not None:
        telling = asyncio.create_task(asyncio.to_thread(teller.ask, schedule))
    made, used = await streams(door, names, num_tokens, counted)
    told = await (telling or asyncio.to_thread(teller.ask, "emitted"))
    emitted = {name: times for full, times in told.items() if (name := full.split("~")[0]) in made}
    events = {name: stream.events() for name, stream in made.items()}
    short = [name for name, found in events.items() if len(found) != num_tokens]
    if short or len(emitted) != len(names):
        raise SystemExit(f"streams that were not answered as they should be: {short}")
    rate = _rate(emitted)
    return Round(
        {name: [at for at, _ in found] for name, found in events.items()},
        emitted,
        {name: [event for _, event in found] for name, found in events.items()},
        [1e6 * cpu / rate for cpu in used],
    )


def _rate(emitted: Times) -> float:
    """Tokens per second of all streams together, while they ran."""
    return sum(
        (len(times) - 1 - 2 * MARGIN) / (times[-MARGIN - 1] - times[MARGIN])
        for times in emitted.values()
    )


# ---------------------------------------------------------------------------- the two tables


async def cost(folder: Path, args: argparse.Namespace) -> list[Row]:
    """All sides in turn; the first turn of each warms up."""
    num_tokens = round(args.seconds / STEP_S)
    names = [f"s{i}" for i in range(args.streams)]
    fake = Process(worker, folder, args.streams)
    front = Process(front_door, folder, fake.told[0], "fake")
    plain = Process(bare)
    http, bare_http = HttpDoor(front.told[0]), HttpDoor(plain.told[0])
    over_grpc = GrpcDoor(front.told[1])
    counted = [(front, 0), (fake, fake.told[1])]
    turns: dict[str, list[Round]] = {"HTTP": [], "gRPC": [], BARE: []}
    try:
        for i in range(args.rounds + 1):
            size = num_tokens if i else WARM_TOKENS
            turns["HTTP"].append(await turn(http, fake, names, size, counted))
            turns["gRPC"].append(await turn(over_grpc, fake, names, size, counted))
            same = turns["HTTP"][-1].schedule()
            turns[BARE].append(await turn(bare_http, plain, names, size, [(plain, 0)], same))
    finally:
        await over_grpc.close()
        for process in (front, fake, plain):
            process.stop()
    figures = {side: _figures(rounds[1:]) for side, rounds in turns.items()}
    added = {
        f"{side} adds": {name: value - figures[BARE][name] for name, value in figures[side].items()}
        for side in ("HTTP", "gRPC")
    }
    return [
        {"side": side, **{name: round(value, 3) for name, value in row.items()}}
        for side, row in (figures | added).items()
    ]


def _figures(rounds: list[Round]) -> dict[str, float]:
    """Medians over the rounds: CPU of a token in each process, and its way to the client."""
    door, *channel = zip(*(one.cpu_us for one in rounds), strict=True)
    figures = {"door_cpu_us": statistics.median(door)}
    figures["worker_cpu_us"] = statistics.median(channel[0]) if channel else 0.0
    for percent in (50, 99):
        delays = [percentile(one.delays_ms(), percent) for one in rounds]
        figures[f"p{percent}_ms"] = statistics.median(delays)
    return figures


async def slow_readers(folder: Path, args: argparse.Namespace) -> list[Row]:
    """The gaps of those who read, when all do and when some have stopped."""
    fake = Process(worker, folder, args.streams)
    front = Process(front_door, folder, fake.told[0], "n" * NAME_BYTES)
    rows: list[Row] = []
    try:
        for turn in range(args.rounds):
            for num_slow in (0, SLOW):
                gaps = await _beside(front.told[0], args, num_slow, turn)
                row: Row = {"stopped": num_slow, "gaps": len(gaps)}
                row |= {f"p{p}_ms": round(percentile(gaps, p), 3) for p in (50, 99, 100)}
                rows.append(row)
    finally:
        front.stop()
        fake.stop()
    return rows


async def _beside(port: int, args: argparse.Namespace, num_slow: int, turn: int) -> list[float]:
    """The gaps (ms) of the others, once nothing more can be sent to those that have stopped."""
    num_tokens = round(args.seconds / STEP_S)
    slow: list[Stream] = []
    others: list[Stream] = []
    for i in range(args.streams):
        name = f"t{turn}-{num_slow}-{i}"
        stream = Stream(name, _body(_prompt(name), num_tokens), keeps=False)
        is_slow = i % (args.streams // SLOW) == 0
        (slow if is_slow else others).append(await _open(port, stream, 2304 if is_slow else None))
    await asyncio.sleep(WARM_S)
    for stream in slow[:num_slow]:
        stream.transport.pause_reading()
    async with asyncio.timeout(num_tokens * STEP_S + 60):
        await asyncio.gather(*(stream.ended for stream in others))
    for stream in slow:
        stream.transport.abort()
    gaps = []
    for stream in others:
        times = [at for at, data in stream.pieces if data.endswith(b"\n\n\r\n")]
        counted = times[round(FULL_S / STEP_S) : -MARGIN]
        gaps += [1000 * (b - a) for a, b in pairwise(counted)]
    return gaps


async def run(args: argparse.Namespace) -> None:
    from bench.tiny import tiny_model  # torch, which a front door does not load

    with tempfile.TemporaryDirectory() as path:
        folder = tiny_model(Path(path), tokenizer=True)
        for kind in args.parts:
            rows = await {"cost": cost, "slow": slow_readers}[kind](folder, args)
            header = list(rows[0])
            print(markdown(header, [[str(row[name]) for name in header] for row in rows]))
            if args.save:
                about = {name: getattr(args, name) for name in ("streams", "seconds", "rounds")}
                save("front", rows, kind=kind, step_s=STEP_S, **about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="that a turn takes; more than 12"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["cost", "slow"], choices=["cost", "slow"])
    parser.add_argument("--no-save", dest="save", action="store_false")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
