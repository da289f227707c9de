"""One long prompt among eight streams, under two scheduling policies.

    python -m bench.interference

Serves the same model twice, once per policy, sends the same load, and compares the gaps between
the tokens of the eight streams while the long prompt is prefilled. Prints a table, writes
``bench/results/interference.jsonl`` and ``interference.png``.
"""

import argparse
import asyncio
import time

import httpx
from rich.console import Console
from rich.table import Table

from bench.client import open_client, stream
from bench.plot import plot_gaps
from bench.report import RESULTS, Record, gaps_within, percentile, save
from bench.server import serving
from bench.workloads import prompt_of

MIXED = {"mode": "mixed"}


async def offer_load(url: str, args: argparse.Namespace) -> list[Record]:
    """Eight streams; when all of them run, the long prompt. Ends when everything has."""
    async with open_client(url) as client:
        await stream(client, "warm-up", prompt_of(300, 99), 8)
        streams = [
            asyncio.create_task(
                stream(client, f"stream-{i}", prompt_of(32, i), args.tokens, evenflow=MIXED)
            )
            for i in range(args.streams)
        ]
        await asyncio.sleep(args.lead_s)
        long = await stream(client, "long", prompt_of(args.prompt, 100), 16, evenflow=MIXED)
        return [*(await asyncio.gather(*streams)), long]


def run(policy: str, args: argparse.Namespace) -> tuple[list[Record], dict[str, object]]:
    flags = ["--policy", policy, "--max-num-batched-tokens", str(args.budget)]
    flags += ["--mixed", "1", "--prefill", "0", "--decode", "0", "--dtype", args.dtype]
    with serving(*flags) as url:
        records = asyncio.run(offer_load(url, args))
        model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    failed = [f"{r.name}: {r.error}" for r in records if r.error]
    if failed:
        raise SystemExit(f"{policy}: " + "; ".join(failed))
    *streams, long = records
    gaps = [gap for record in streams for gap in record.gaps_s]
    during = gaps_within(streams, long.sent_at, long.token_times[0])
    row: dict[str, object] = {
        "policy": policy,
        "budget": args.budget,
        "model": model,
        "streams": args.streams,
        "longest_gap_s": round(max(gaps), 4),
        "p99_gap_s": round(percentile(gaps, 99), 4),
        "median_gap_s": round(percentile(gaps, 50), 4),
        "median_gap_during_prefill_s": round(percentile(during, 50), 4),
        "long_ttft_s": round(long.ttft_s, 3),
        "longest_short_ttft_s": round(max(r.ttft_s for r in streams), 3),
    }
    return records, row


def show(rows: list[dict[str, object]]) -> None:
    table = Table(title="Gaps between the tokens of the streams, one long prompt among them")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs=2, default=["prefill-first", "chunked"])
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=250, help="tokens of each stream")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--lead-s", type=float, default=4.0, help="streams run alone this long")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    started = time.monotonic()
    runs = {policy: run(policy, args) for policy in args.policies}
    rows = [row for _, row in runs.values()]
    show(rows)
    before, after = (float(str(row["longest_gap_s"])) for row in rows)
    ratio = round(before / after, 1)
    print(f"longest gap: {args.policies[1]} is {ratio}x shorter than {args.policies[0]}")
    picture = plot_gaps(
        {policy: records for policy, (records, _) in runs.items()}, RESULTS / "interference.png"
    )
    path = save("interference", rows, ratio=ratio, seconds=round(time.monotonic() - started))
    print(f"written: {path.name}, {picture.name}")


if __name__ == "__main__":
    main()
