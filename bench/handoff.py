"""What a hand-off costs the stream: the gap between its first and its second token.

    python -m bench.handoff

Serves SmolLM2 on one prefill and one decode worker, once with pages fetched early and once late,
and sends prompts of growing length one at a time. Prints by how much the gap at the hand-off
exceeds a normal one of the same stream (the decode worker's, at that context), beside the time that
the pages of one chunk take to move: as a fetch of their own, and raw. A chunk is as large as the
prefill worker made it. Then what a large transfer reaches of the raw transport's bandwidth.
Writes ``bench/results/handoff.jsonl``.
"""

import argparse
import asyncio
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench.client import open_client, stream
from bench.report import RESULTS, percentile, save
from bench.server import serving
from bench.transfer import Road, open_road
from bench.workloads import prompt_of
from kvtransfer.core.handle import KVLayout
from workers.models.config import ModelConfig
from workers.weights import resolve

SPLIT = {"mode": "disaggregated"}
LARGE_BYTES = 64 << 20
ROUNDS = 21
ATTACH_TIMEOUT_S = 60.0
WATCH_S = 0.02
CHUNK = re.compile(r'evenflow_worker_chunk_tokens{[^}]*worker="prefill[^"]*"[^}]*} ([0-9.]+)')


@dataclass(slots=True)
class Found:
    """Of one prompt length."""

    chunk_tokens: int = 0  # the largest that the prompt was computed in
    excess_s: list[float] = field(default_factory=list)  # hand-off gap - median gap, per stream


async def measure(url: str, args: argparse.Namespace, trials: int) -> dict[int, Found]:
    """By prompt length."""
    found: dict[int, Found] = {}
    async with open_client(url) as client:
        await both_attached(client)
        await stream(client, "warm-up", prompt_of(300, 1), 8, evenflow=SPLIT)
        for length in args.lengths:
            found[length] = Found(await chunk_of(client, length))
            for trial in range(trials):
                prompt = prompt_of(length, 1000 * length + trial)
                record = await stream(client, str(length), prompt, args.tokens, evenflow=SPLIT)
                if record.error or record.evenflow.get("fallback"):
                    raise SystemExit(f"{length} tokens: {record.error or record.evenflow}")
                first, *others = record.gaps_s
                found[length].excess_s.append(first - percentile(others, 50))
    return found


async def chunk_of(client: httpx.AsyncClient, length: int) -> int:
    """Watch one prompt being computed. It is not measured."""
    prompt = prompt_of(length, 999 + length)
    running = asyncio.create_task(stream(client, "watched", prompt, 2, evenflow=SPLIT))
    seen = [0.0]
    while not running.done():
        seen += map(float, CHUNK.findall((await client.get("/metrics")).text))
        await asyncio.sleep(WATCH_S)
    return int(max(seen))


async def both_attached(client: httpx.AsyncClient) -> None:
    """A server is ready with its first worker; a hand-off needs two."""
    async with asyncio.timeout(ATTACH_TIMEOUT_S):
        while len((await client.get("/v1/evenflow/status")).json()["workers"]) < 2:
            await asyncio.sleep(0.2)


def run(dtype: str, early: bool, args: argparse.Namespace) -> dict[int, Found]:
    flags = ["--ray", "local", "--mixed", "0", "--prefill", "1", "--decode", "1", "--dtype", dtype]
    flags += ["--num-pages", "1024"]
    if args.budget:
        flags += ["--max-num-batched-tokens", str(args.budget)]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(f"early_fetch: {str(early).lower()}\n")
        with serving(*flags, "--config", str(config)) as url:
            trials = args.trials if early else args.late_trials
            return asyncio.run(measure(url, args, trials))


def rows_of(dtype: str, args: argparse.Namespace, road: Road) -> list[dict[str, object]]:
    early, late = run(dtype, True, args), run(dtype, False, args)
    rows: list[dict[str, object]] = []
    for length in args.lengths:
        chunk = early[length].chunk_tokens
        move = road.measure(-(-chunk // 16), ROUNDS)
        excess = early[length].excess_s
        rows.append(
            {
                "dtype": dtype,
                "prompt_tokens": length,
                "early_excess_ms": _ms(percentile(excess, 50)),
                "least": _ms(min(excess)),
                "most": _ms(max(excess)),
                "late_excess_ms": _ms(percentile(late[length].excess_s, 50)),
                "chunk_tokens": chunk,
                "chunk_fetch_ms": _ms(move.fetch_s),
                "chunk_raw_ms": _ms(move.raw_s),
            }
        )
    return rows


def bandwidth(dtype: str, layout: KVLayout, road: Road) -> dict[str, object]:
    """Of one large transfer."""
    cost = road.measure(LARGE_BYTES // layout.page_bytes, ROUNDS)
    return {
        "dtype": dtype,
        "mib": round(cost.num_bytes / 2**20),
        "raw_gb_s": round(cost.num_bytes / cost.raw_s / 1e9, 2),
        "fetch_gb_s": round(cost.num_bytes / cost.fetch_s / 1e9, 2),
        "part_of_raw": round(cost.raw_s / cost.fetch_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 2000, 4000, 6000])
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--late-trials", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--budget", type=int, help="tokens a step; else as the worker thinks best")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    large: list[dict[str, object]] = []
    for dtype in args.dtypes:
        layout = ModelConfig.load(resolve("")).kv_layout(16, dtype)
        with open_road(layout, 2 * LARGE_BYTES // layout.page_bytes) as road:
            rows += rows_of(dtype, args, road)
            large.append(bandwidth(dtype, layout, road))
    show("The gap at the hand-off, beyond a normal gap between tokens", rows)
    show("One large transfer, of scattered pages", large)
    path = save(
        "handoff", rows, large=large, trials=args.trials, budget=args.budget or "by the worker"
    )
    print(f"written: {path.relative_to(RESULTS.parent)}")


def show(title: str, rows: list[dict[str, object]]) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=160).print(table)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


if __name__ == "__main__":
    main()
