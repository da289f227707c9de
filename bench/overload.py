"""Too much of everything: more requests than can be served, readers that stop reading, and many
thousand streams one after another.

    python -m bench.overload                   # all three parts, about 12 minutes
    python -m bench.overload --parts memory

Prints a table for each part and writes ``bench/results/overload.jsonl``.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.client import OPENAI, open_client, stream
from bench.report import Record, Slo, markdown, percentile, save
from bench.server import EVENFLOW_ENV, Server, evenflow_command, free_port, running
from bench.tiny import tiny_model
from bench.workloads import prompt_of

SLO = Slo(ttft_s=2.0, gap_s=0.150)
PROMPT, ANSWER = 64, 24  # tokens of each request under overload
REFUSED_S = 0.2  # a refusal takes at most this long
MEASURED, SLOW = 8, 20  # streams that are watched, and readers beside them
WARM_UP, BATCH = 500, 250  # streams before memory is watched, and between two looks
KIB, MIB = 1 << 10, 1 << 20
Row = dict[str, object]


# ---------------------------------------------------------------------------- overload


@dataclass
class Offered:
    """What became of the requests of one load."""

    records: list[Record] = field(default_factory=list)  # admitted
    refusals_s: list[float] = field(default_factory=list)
    num_silent: int = 0  # refusals that do not say when to come back

    @property
    def num_good(self) -> int:
        return sum(SLO.is_met_by(record) for record in self.records)

    async def send(self, client: httpx.AsyncClient, record: Record, seed: int) -> None:
        """One request; times count from when it was due."""
        body, sent = OPENAI.body(prompt_of(PROMPT, seed), ANSWER), time.perf_counter()
        try:
            async with client.stream("POST", OPENAI.path, json=body) as response:
                if response.status_code == 429:
                    self.refusals_s.append(time.perf_counter() - sent)
                    self.num_silent += "retry-after" not in response.headers
                    return
                async for line in response.aiter_lines():
                    _note(line, record)
        except httpx.HTTPError as error:
            record.error = type(error).__name__
        if len(record.token_times) != ANSWER:
            record.error = record.error or f"{len(record.token_times)} tokens"
        self.records.append(record)


def _note(line: str, record: Record) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line[6:])
    if "error" in event:
        record.error = event["error"]["message"]
        return
    now = time.perf_counter()
    record.token_times.extend([now] * OPENAI.num_tokens(event, len(record.token_times)))


async def open_loop(client: httpx.AsyncClient, rate: float, window_s: float, seed: int) -> Offered:
    """Poisson arrivals; ends when the last one has been answered."""
    offered, rng, tasks = Offered(), random.Random(seed), []
    due = time.perf_counter()
    end = due + window_s
    while (due := due + rng.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        record = Record("request", due, num_prompt_tokens=PROMPT)
        tasks.append(asyncio.create_task(offered.send(client, record, rng.getrandbits(30))))
    await asyncio.gather(*tasks)
    return offered


async def capacity(client: httpx.AsyncClient, seconds: float) -> float:
    """Requests per second when sixteen clients ask again and again."""
    until, done = time.perf_counter() + seconds, 0

    async def ask(name: int) -> None:
        nonlocal done
        while time.perf_counter() < until:
            record = await stream(client, "c", prompt_of(PROMPT, name + 97 * done), ANSWER)
            done += record.error is None

    started = time.perf_counter()
    await asyncio.gather(*(ask(i) for i in range(16)))
    return done / (time.perf_counter() - started)


async def overload(server: Server, args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    async with open_client(server.url) as client:
        await stream(client, "warm-up", prompt_of(PROMPT, 1), 8)
        peak = await capacity(client, args.seconds / 6)
        for load in args.loads:
            window_s = args.seconds if load > 1 else args.seconds / 2
            offered = await open_loop(client, load * peak, window_s, seed=int(10 * load))
            failed = [record.error for record in offered.records if record.error]
            rows.append({
                "load": load,
                "offered_per_s": round(load * peak, 2),
                "goodput_per_s": round(offered.num_good / window_s, 3),
                "admitted": len(offered.records),
                "admitted_failed": len(failed),
                "refused": len(offered.refusals_s),
                "refused_p99_s": round(percentile(offered.refusals_s, 99), 4),
                "refused_late": sum(took > REFUSED_S for took in offered.refusals_s),
                "refused_without_retry_after": offered.num_silent,
                "memory_mib": round(server.memory_bytes() / MIB),
            })  # fmt: skip
    best = max(float(str(row["goodput_per_s"])) for row in rows)
    for row in rows:
        row["of_peak"] = round(float(str(row["goodput_per_s"])) / best, 3) if best else 0.0
    return rows


# ---------------------------------------------------------------------------- slow readers


async def gaps_beside(server: Server, reads: bool, tokens: int) -> list[float]:
    """Of the streams that are watched, while others run that are read or are not."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(OPENAI.body(prompt_of(32, 5), 6 * tokens) | {"logprobs": 20}).encode()
    head = f"POST {OPENAI.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    others: list[asyncio.StreamWriter] = []
    readers: list[asyncio.Task[bytes]] = []
    for _ in range(SLOW):
        reader, writer = await asyncio.open_connection(host, int(port), limit=4 * KIB)
        writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readline()  # it has begun
        others.append(writer)
        if reads:
            readers.append(asyncio.create_task(reader.read()))
    async with open_client(server.url) as client:
        await asyncio.sleep(2.0)
        watched = await asyncio.gather(
            *(stream(client, f"s{i}", prompt_of(32, i), tokens) for i in range(MEASURED))
        )
    for task in readers:
        task.cancel()
    for writer in others:
        writer.transport.abort()
    await asyncio.sleep(2.0)
    if failed := [record.error for record in watched if record.error]:
        raise SystemExit(f"streams beside slow readers failed: {failed[0]}")
    return [gap for record in watched for gap in record.gaps_s]


async def readers(server: Server, args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for name, reads in (("read", True), ("not read", False)):
        gaps = await gaps_beside(server, reads, args.tokens)
        rows.append({
            f"{SLOW} other streams are": name,
            "median_gap_s": round(percentile(gaps, 50), 5),
            "p99_gap_s": round(percentile(gaps, 99), 5),
        })  # fmt: skip
    for figure in ("median_gap_s", "p99_gap_s"):
        read, unread = (float(str(row[figure])) for row in rows)
        rows[1][f"{figure} as read"] = round(unread / read, 3)
    return rows


# ---------------------------------------------------------------------------- memory


@dataclass
class Watched:
    """One process: its memory and open files after so many streams."""

    name: str
    streams: list[int] = field(default_factory=list)
    kib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def row(self) -> Row:
        slope = _slope(self.streams, self.kib)
        rng = random.Random(1)
        picks = [rng.choices(range(len(self.kib)), k=len(self.kib)) for _ in range(500)]
        slopes = [
            _slope([self.streams[i] for i in pick], [self.kib[i] for i in pick])
            for pick in picks
            if len(set(pick)) > 1
        ]
        return {
            "process": self.name,
            "kib_per_request": round(slope, 3),
            "upper_95": round(percentile(slopes, 95), 3),
            "kib_at_the_end": round(self.kib[-1]),
            "files_grown_by": self.files[-1] - self.files[0],
        }


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    return statistics.linear_regression(xs, ys).slope


def look(server: Server, watched: dict[int, Watched], streams: int) -> None:
    for pid in server.processes():
        with suppress(OSError):
            folder = Path(f"/proc/{pid}")
            title = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            pages = int((folder / "statm").read_text().split()[1])
            files = len(list((folder / "fd").iterdir()))
            one = watched.setdefault(pid, Watched(Path(title.split()[0]).name if title else "?"))
            one.streams.append(streams)
            one.kib.append(pages * 4.0)
            one.files.append(files)


async def memory(server: Server, args: argparse.Namespace) -> list[Row]:
    watched: dict[int, Watched] = {}
    async with open_client(server.url) as client:

        async def some(num: int, seed: int) -> None:
            gate = asyncio.Semaphore(16)

            async def one(i: int) -> None:
                async with gate:
                    await stream(client, "s", prompt_of(16, seed + i), 8)

            await asyncio.gather(*(one(i) for i in range(num)))

        await some(WARM_UP, 0)
        for done in range(0, args.streams, BATCH):
            look(server, watched, done)
            await some(BATCH, 10_000 + done)
        look(server, watched, args.streams)
    whole = [one for one in watched.values() if len(one.kib) == args.streams // BATCH + 1]
    rows = [one.row() for one in whole]
    return sorted(rows, key=lambda row: -float(str(row["upper_95"])))


# ---------------------------------------------------------------------------- the command

PARTS = {"overload": overload, "readers": readers, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--loads", nargs="+", type=float, default=[0.6, 0.8, 1.0, 3.0, 5.0])
    parser.add_argument("--seconds", type=float, default=120.0, help="of each overload")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream beside readers")
    parser.add_argument("--streams", type=int, default=5000, help="while memory is watched")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = tiny_model(Path(folder) / "t0", tokenizer=True)
        for part in args.parts:
            port = free_port()
            flags = ["--mixed", "1", "--prefill", "0", "--ray", "local"]
            flags += ["--model", str(tiny)] if part == "memory" else []
            command = evenflow_command(port, flags)
            with running(command, port, "/ready", env=EVENFLOW_ENV) as server:
                rows = asyncio.run(PARTS[part](server, args))
            show(part, rows)
            print("written:", save("overload", rows, part=part).name)


def show(part: str, rows: list[Row]) -> None:
    header = list(dict.fromkeys(key for row in rows for key in row))
    print(f"\n{part}\n")
    print(markdown(header, [[str(row.get(key, "")) for key in header] for row in rows]))


if __name__ == "__main__":
    main()
