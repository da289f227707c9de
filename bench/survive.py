"""Workers that die, freeze or change their roles under running streams, on Ray.

    python -m bench.survive                         # all of it
    python -m bench.survive --only decode --trials 3

Serves a tiny model on two prefill and two decode workers. Every stream is compared, token by
token, with an undisturbed run of the same prompt. Prints a row per kind of trouble and writes
``bench/results/survive.jsonl``.

    decode    SIGKILL of a decode worker with 8 streams in flight, at random tokens
    prefill   SIGKILL of a prefill worker: mid-prefill, after its answer, while pages move
    stop      SIGSTOP of a decode worker for a minute, with 8 streams in flight
    moves     50 role flips and 200 moves under 8 continuous streams
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench.client import open_client
from bench.report import percentile, save
from bench.server import EVENFLOW_ENV, Server, evenflow_command, free_port, running
from bench.tiny import tiny_model
from bench.workloads import prompt_of

NUM_STREAMS = 8
STOP_S, STALL_S = 60.0, 5.0
BACK_S = 120.0  # within which a pool has to be whole again for the next trial
CONFIG = f"stall_timeout_s: {STALL_S}\ntransfer_timeout_s: 2\nlease_s: 10\n"
SLOW_PAGES = "page_faults: delay=1 delay_s=0.5\n"


@dataclass(slots=True)
class Told:
    """One stream as its client saw it."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    sent_at: float = field(default_factory=time.perf_counter)

    @property
    def longest_gap_s(self) -> float:
        times = [self.sent_at, *self.times]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@dataclass(slots=True)
class Bench:
    """A server, a client, and what undisturbed runs say."""

    server: Server
    client: httpx.AsyncClient
    num_tokens: int
    right: list[list[int]] = field(default_factory=list)
    took_s: float = 0.0  # an undisturbed run of all streams

    async def ask(self, index: int, told: Told, mode: str = "auto", name: str = "") -> None:
        body = {
            "prompt": prompt_of(200 + 60 * index, 500 + index),
            "max_tokens": self.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "evenflow": {"mode": mode},
        }
        headers = {"x-request-id": name} if name else {}
        try:
            async with self.client.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as response:
                async for line in response.aiter_lines():
                    self._read(line, told)
        except httpx.HTTPError as error:
            told.error = f"{type(error).__name__}: {error}"

    def _read(self, line: str, told: Told) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line[6:])
        if "error" in event:
            told.error = event["error"]["message"]
            return
        ids = [i for choice in event["choices"] for i in choice.get("token_ids") or ()]
        told.tokens += ids
        told.times += [time.perf_counter()] * len(ids)

    async def learn(self) -> None:
        """What is right, and how long it takes."""
        alone = [Told() for _ in range(NUM_STREAMS)]
        for index, told in enumerate(alone):
            await self.ask(index, told)
            assert not told.error, told.error
        self.right = [told.tokens for told in alone]
        started = time.perf_counter()
        await asyncio.gather(*(self.ask(i, Told()) for i in range(NUM_STREAMS)))
        self.took_s = time.perf_counter() - started

    def pids(self, pool: str) -> list[int]:
        found = []
        for pid in self.server.processes():
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
            if f"ServeReplica:evenflow:{pool}".encode() in title:
                found.append(pid)
        return found

    async def workers(self) -> list[dict[str, object]]:
        status = (await self.client.get("/v1/evenflow/status")).json()
        return [w for w in status["workers"] if not w["is_leaving"]]

    async def whole(self, num_workers: int) -> float:
        """Seconds until so many workers are attached."""
        started = time.perf_counter()
        async with asyncio.timeout(BACK_S):
            while len(await self.workers()) < num_workers:
                await asyncio.sleep(0.1)
        return time.perf_counter() - started

    def row(
        self, what: str, trials: int, told: Sequence[Told], **more: object
    ) -> dict[str, object]:
        finished = [t for t in told if not t.error and len(t.tokens) == self.num_tokens]
        identical = sum(t.tokens in self.right for t in finished)
        gaps = [t.longest_gap_s for t in finished]
        return {
            "what": what,
            "trials": trials,
            "streams": len(told),
            "finished": len(finished),
            "identical": identical,
            "gap_p95_ms": round(1000 * percentile(gaps, 95)),
            "gap_max_ms": round(1000 * max(gaps, default=0.0)),
            **more,
        }


async def kill_decode(bench: Bench, trials: int, rng: random.Random) -> list[dict[str, object]]:
    everything, back = [], []
    for _ in range(trials):
        told = [Told() for _ in range(NUM_STREAMS)]
        calls = asyncio.gather(*(bench.ask(i, t) for i, t in enumerate(told)))
        await asyncio.sleep(bench.took_s * rng.uniform(0.1, 0.8))
        os.kill(rng.choice(bench.pids("decode")), signal.SIGKILL)
        await calls
        await asyncio.sleep(0.3)  # until the loss has been noticed
        back.append(await bench.whole(4))
        everything += told
    return [bench.row("SIGKILL decode", trials, everything, back_max_s=round(max(back), 1))]


async def kill_prefill(bench: Bench, trials: int, rng: random.Random) -> list[dict[str, object]]:
    rows = []
    for moment in ("mid-prefill", "after its answer", "while pages move"):
        everything, back = [], []
        for _ in range(trials):
            told = [Told() for _ in range(NUM_STREAMS)]
            how = [(i, t, "disaggregated") for i, t in enumerate(told)]
            calls = asyncio.gather(*(bench.ask(*each) for each in how))
            if moment == "mid-prefill":
                await asyncio.sleep(rng.uniform(0.005, 0.05))
            else:
                while not any(t.tokens or t.error for t in told):
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.15 if moment == "while pages move" else 0.0)
            os.kill(rng.choice(bench.pids("prefill")), signal.SIGKILL)
            await calls
            await asyncio.sleep(0.3)
            back.append(await bench.whole(4))
            everything += told
        back_s = round(max(back), 1)
        rows.append(bench.row(f"SIGKILL prefill, {moment}", trials, everything, back_max_s=back_s))
    return rows


async def stop_decode(bench: Bench, trials: int, rng: random.Random) -> list[dict[str, object]]:
    told = [Told() for _ in range(NUM_STREAMS)]
    calls = asyncio.gather(*(bench.ask(i, t) for i, t in enumerate(told)))
    await asyncio.sleep(bench.took_s * 0.2)
    victim = rng.choice(bench.pids("decode"))
    os.kill(victim, signal.SIGSTOP)
    try:
        stopped = time.perf_counter()
        await calls
        await asyncio.sleep(max(0.0, STOP_S - (time.perf_counter() - stopped)))
    finally:
        os.kill(victim, signal.SIGCONT)
    back_s = await bench.whole(4)
    is_same = victim in bench.pids("decode")
    return [
        bench.row(
            "SIGSTOP decode for 60 s",
            1,
            told,
            stall_timeout_s=STALL_S,
            back_max_s=round(back_s, 1),
            rejoined="the same process" if is_same else "another one",
        )
    ]


async def flips_and_moves(bench: Bench, trials: int, rng: random.Random) -> list[dict[str, object]]:
    """``trials`` in twentieths of 50 flips and 200 moves."""
    everything: list[Told] = []
    enough = asyncio.Event()

    async def continuous(index: int) -> None:
        while not enough.is_set():
            told = Told()
            everything.append(told)
            await bench.ask(index, told, name=f"s{index}")

    streams = [asyncio.create_task(continuous(i)) for i in range(NUM_STREAMS)]
    flips = moves = 0
    try:
        while flips < 50 * trials / 20 or moves < 200 * trials / 20:
            await asyncio.sleep(0.05)
            names = [str(w["id"]) for w in await bench.workers()]
            if flips < moves / 4:
                role = {"role": rng.choice(["mixed", "prefill", "decode"])}
                path = f"/v1/evenflow/workers/{rng.choice(names)}/role"
                flips += (await bench.client.post(path, json=role)).status_code == 200
            else:
                path = f"/v1/evenflow/requests/s{rng.randrange(NUM_STREAMS)}/move"
                where = {"worker": rng.choice(names)}
                moves += (await bench.client.post(path, json=where)).status_code == 200
    finally:
        enough.set()
        await asyncio.gather(*streams)
    return [bench.row("role flips and moves", 1, everything, flips=flips, moves=moves)]


SECTIONS = {
    "decode": kill_decode,
    "prefill": kill_prefill,
    "stop": stop_decode,
    "moves": flips_and_moves,
}


@asynccontextmanager
async def served(section: str, num_tokens: int) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model(folder / "t0", tokenizer=True)
        config = folder / "config.yaml"
        config.write_text(CONFIG + (SLOW_PAGES if section == "prefill" else ""))
        flags = ["--model", str(model), "--ray", "local", "--dtype", "float32", "--debug"]
        flags += ["--mixed", "0", "--prefill", "2", "--decode", "2", "--num-pages", "1024"]
        port = free_port()
        command = evenflow_command(port, [*flags, "--config", str(config)])
        with running(command, port, "/ready", env=EVENFLOW_ENV) as server:
            async with open_client(server.url) as client:
                bench = Bench(server, client, num_tokens)
                await bench.whole(4)
                await bench.learn()
                yield bench


async def run(sections: Sequence[str], trials: int, num_tokens: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for section in sections:
        async with served(section, num_tokens) as bench:
            share = trials if section != "prefill" else max(1, trials // 2)
            for row in await SECTIONS[section](bench, share, random.Random(7)):
                print(row, flush=True)
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args()
    started = time.monotonic()
    rows = asyncio.run(run(args.only, args.trials, args.tokens))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title="Streams whose workers die, freeze or change")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    Console(width=200).print(table)
    took_s = round(time.monotonic() - started)
    print(f"in {took_s} s")
    if args.trials >= 20:
        save("survive", rows, took_s=took_s, tokens=args.tokens)


if __name__ == "__main__":
    main()
