"""What a hand-off costs the stream: the gap between its first and its second token.

    python -m bench.handoff

Serves SmolLM2 on one prefill and one decode worker, once with pages fetched early and once late,
and sends prompts of growing length one at a time. Prints by how much the gap at the hand-off
exceeds a normal one, beside the time that one chunk's pages take to move at the raw transport's
bandwidth.
Writes ``bench/results/handoff.jsonl``.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import httpx
import torch
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import distributed

from bench.client import open_client, stream
from bench.report import RESULTS, percentile, save
from bench.server import serving
from bench.workloads import prompt_of
from workers.models.config import ModelConfig
from workers.weights import resolve

SPLIT = {"mode": "disaggregated"}
RAW_BYTES, RAW_ROUNDS = 64 << 20, 8
ATTACH_TIMEOUT_S = 60.0


async def measure(url: str, args: argparse.Namespace) -> dict[int, list[float]]:
    """By prompt length: seconds by which each hand-off's gap exceeds the stream's median gap."""
    found: dict[int, list[float]] = {}
    async with open_client(url) as client:
        await both_attached(client)
        await stream(client, "warm-up", prompt_of(300, 1), 8, evenflow=SPLIT)
        for length in args.lengths:
            for trial in range(args.trials):
                prompt = prompt_of(length, 1000 * length + trial)
                record = await stream(client, str(length), prompt, args.tokens, evenflow=SPLIT)
                if record.error or record.evenflow.get("fallback"):
                    raise SystemExit(f"{length} tokens: {record.error or record.evenflow}")
                first, *others = record.gaps_s
                found.setdefault(length, []).append(first - percentile(others, 50))
    return found


async def both_attached(client: httpx.AsyncClient) -> None:
    """A server is ready with its first worker; a hand-off needs two."""
    async with asyncio.timeout(ATTACH_TIMEOUT_S):
        while len((await client.get("/v1/evenflow/status")).json()["workers"]) < 2:
            await asyncio.sleep(0.2)


def _send(rank: int, file: str, seconds: "multiprocessing.SimpleQueue[float]") -> None:
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    buffer = torch.zeros(RAW_BYTES, dtype=torch.uint8)
    for _ in range(RAW_ROUNDS):
        distributed.barrier()
        start = time.perf_counter()
        if rank == 0:
            distributed.send(buffer, 1)
        else:
            distributed.recv(buffer, 0)
            seconds.put(time.perf_counter() - start)
    distributed.destroy_process_group()


def raw_bandwidth() -> float:
    """Bytes per second of Gloo between two processes here, nothing checked or copied."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        seconds = context.SimpleQueue()
        file = str(Path(folder) / "store")
        processes = [context.Process(target=_send, args=(i, file, seconds)) for i in range(2)]
        for process in processes:
            process.start()
        taken = [seconds.get() for _ in range(RAW_ROUNDS)]
        for process in processes:
            process.join(30)
    return RAW_BYTES / percentile(taken, 50)


def run(dtype: str, early: bool, args: argparse.Namespace) -> dict[int, list[float]]:
    flags = ["--ray", "local", "--mixed", "0", "--prefill", "1", "--decode", "1", "--dtype", dtype]
    flags += ["--max-num-batched-tokens", str(args.budget), "--num-pages", "1024"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(f"early_fetch: {str(early).lower()}\n")
        with serving(*flags, "--config", str(config)) as url:
            return asyncio.run(measure(url, args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 2000, 4000, 6000])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    bandwidth = raw_bandwidth()
    rows: list[dict[str, object]] = []
    for dtype in args.dtypes:
        layout = ModelConfig.load(resolve("")).kv_layout(16, dtype)
        chunk_s = args.budget // 16 * layout.page_bytes / bandwidth
        gaps = {early: run(dtype, early, args) for early in (True, False)}
        rows += [
            {
                "dtype": dtype,
                "prompt_tokens": length,
                "early_excess_ms": _ms(percentile(gaps[True][length], 50)),
                "late_excess_ms": _ms(percentile(gaps[False][length], 50)),
                "one_chunk_ms": _ms(chunk_s),
                "whole_prompt_ms": _ms(chunk_s * length / args.budget),
            }
            for length in args.lengths
        ]
    table = Table(title="The gap at the hand-off, beyond a normal gap between tokens")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=160).print(table)
    path = save("handoff", rows, raw_gloo_gb_s=round(bandwidth / 1e9, 2), trials=args.trials)
    print(f"written: {path.relative_to(RESULTS.parent)}")


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


if __name__ == "__main__":
    main()
