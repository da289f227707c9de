"""Pages over a broken network: is an answer ever wrong, and does one ever hang?

    python -m bench.pages

A prefill and a decode worker of a tiny model, each a process. First each transfer may be dropped,
delayed up to 2 s, truncated, flipped, repeated or reordered, 5 % each; then every single one has a
bit flipped. Every answer is compared with an undisturbed run. Writes ``bench/results/pages.jsonl``.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.calls import Answer, ask
from bench.processes import SMALL, Cluster
from bench.report import percentile, save
from bench.tiny import tiny_model
from serving.config import Role
from serving.errors import RequestFailed

ROLES: dict[str, Role] = {"p": "prefill", "d": "decode"}
KINDS = {
    "5 % each": "drop=0.05 delay=0.05 truncate=0.05 flip=0.05 duplicate=0.05 reorder=0.05 seed=5",
    "every bit flip": "flip=1 seed=6",
}
NUM_PROMPTS, NUM_TOKENS = 50, 16
HANGS_S = 10.0


async def _one(
    cluster: Cluster, name: str, prompt: Sequence[int], right: list[int]
) -> tuple[str, float]:
    """What became of one request, and how long it took."""
    answer, started = Answer(), time.monotonic()
    try:
        await ask(cluster.gateway, name, prompt, NUM_TOKENS, "disaggregated", answer=answer)
    except RequestFailed:
        return "failed", time.monotonic() - started
    took_s = time.monotonic() - started
    if answer.tokens != right:
        return "wrong", took_s
    return "computed again" if answer.trace.fallback else "fetched", took_s


async def disturbed(
    cluster: Cluster, kind: str, prompts: Sequence[Sequence[int]], num: int, at_once: int
) -> dict[str, object]:
    await cluster.mend()
    calls = [ask(cluster.gateway, f"m{i}", p, NUM_TOKENS, "mixed") for i, p in enumerate(prompts)]
    right = [answer.tokens for answer in await asyncio.gather(*calls)]
    await cluster.mend(p=replace(cluster.config, page_faults=KINDS[kind]))
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> tuple[str, float]:
        async with room:
            i = number % len(prompts)
            return await _one(cluster, f"{kind}-{number}", prompts[i], right[i])

    ends = await asyncio.gather(*(one(number) for number in range(num)))
    await cluster.until_clean(15.0)
    words = [word for word, _ in ends]
    times = [took_s for _, took_s in ends]
    return {
        "faults": kind,
        "requests": num,
        **{w: words.count(w) for w in ("fetched", "computed again", "wrong", "failed")},
        "hangs": sum(took_s > HANGS_S for took_s in times),
        "p50_s": round(percentile(times, 50), 2),
        "max_s": round(max(times), 2),
    }


async def run(requests: int, flips: int, at_once: int) -> list[dict[str, object]]:
    rng = random.Random(4)
    prompts = [
        [rng.randrange(3, 49152) for _ in range(rng.randint(20, 300))] for _ in range(NUM_PROMPTS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = replace(SMALL, num_pages=1024, transfer_timeout_s=2.0, lease_s=5.0)
        cluster = Cluster(tiny_model(Path(folder), tokenizer=True), ROLES, config)
        try:
            rows = []
            for kind, num in zip(KINDS, (requests, flips), strict=True):
                rows.append(await disturbed(cluster, kind, prompts, num, at_once))
                print(rows[-1], flush=True)
            return rows
        finally:
            await cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    args = parser.parse_args()
    started = time.monotonic()
    rows = asyncio.run(run(args.requests, args.flips, args.at_once))
    table = Table(title="Disaggregated requests over a broken network")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=140).print(table)
    took_s = round(time.monotonic() - started)
    print(f"in {took_s} s")
    if args.requests >= 500 and args.flips >= 1000:
        save("pages", rows, took_s=took_s, at_once=args.at_once)


if __name__ == "__main__":
    main()
