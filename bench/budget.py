"""The online step budget against fixed ones, under three promises at once.

    python -m bench.budget

Eight streams; two prompts of 4,000 tokens arrive, one alone and one with a short prompt behind it.
The online budget is told the promised gap with each request; a fixed budget is measured once and
held against all three promises. Writes ``bench/results/budget.jsonl``.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.client import open_client, stream
from bench.report import Record, percentile, save
from bench.server import serving
from bench.workloads import prompt_of

SHORT_AFTER_S = 1.0  # a short prompt follows the second long one
SHORT_TOKENS = 60
ONLINE = "online"


@dataclass(frozen=True, slots=True)
class Load:
    """What one setting made of the load."""

    streams: list[Record]
    alone: Record  # a long prompt
    followed: Record  # another one, with the short prompt behind it
    short: Record

    @property
    def gaps_s(self) -> list[float]:
        return [gap for record in self.streams for gap in record.gaps_s]

    def kept(self, itl_s: float) -> float:
        """The part of all gaps that stay within the promise."""
        return sum(gap <= itl_s for gap in self.gaps_s) / len(self.gaps_s)


async def offer(url: str, itl_ms: float, args: argparse.Namespace) -> Load:
    seed = iter(range(1, 1 << 20))
    want = {"mode": "mixed", "slo": {"ttft_ms": 2000, "itl_ms": itl_ms}}
    async with open_client(url) as client:

        async def send(name: str, num_prompt: int, num_tokens: int) -> Record:
            prompt = prompt_of(num_prompt, round(time.time() * 1e3) + next(seed))
            return await stream(client, name, prompt, num_tokens, evenflow=want)

        await send("warm-up", 300, 8)
        names = [f"stream-{i}" for i in range(args.streams)]
        streams = [asyncio.create_task(send(name, 32, args.tokens)) for name in names]
        await asyncio.sleep(args.pause_s)
        alone = await send("alone", args.prompt, 8)
        await asyncio.sleep(args.pause_s)
        followed = asyncio.create_task(send("followed", args.prompt, 8))
        await asyncio.sleep(SHORT_AFTER_S)
        short = await send("short", SHORT_TOKENS, 8)
        load = Load(list(await asyncio.gather(*streams)), alone, await followed, short)
    failed = [
        f"{r.name}: {r.error}" for r in (*load.streams, alone, load.followed, short) if r.error
    ]
    if failed:
        raise SystemExit("; ".join(failed))
    return load


def measure(args: argparse.Namespace) -> dict[tuple[str, float], Load]:
    """The load of each setting under each promise (ms)."""
    flags = ["--ray", "local", "--mixed", "1", "--prefill", "0", "--decode", "0"]
    flags += ["--dtype", args.dtype]
    loads: dict[tuple[str, float], Load] = {}
    with serving(*flags) as url:
        for itl_ms in args.itl_ms:
            loads[ONLINE, itl_ms] = asyncio.run(offer(url, itl_ms, args))
    for budget in args.budgets:
        with serving(*flags, "--max-num-batched-tokens", str(budget)) as url:
            load = asyncio.run(offer(url, args.itl_ms[0], args))
        loads |= {(str(budget), itl_ms): load for itl_ms in args.itl_ms}
    return loads


def row(setting: str, itl_ms: float, load: Load) -> dict[str, object]:
    return {
        "itl_slo_ms": itl_ms,
        "budget": setting,
        "gaps_kept": round(load.kept(itl_ms / 1e3), 4),
        "median_gap_s": round(percentile(load.gaps_s, 50), 4),
        "p99_gap_s": round(percentile(load.gaps_s, 99), 4),
        "long_ttft_s": round(load.alone.ttft_s, 2),
        "long_ttft_with_short_s": round(load.followed.ttft_s, 2),
        "short_ttft_s": round(load.short.ttft_s, 3),
    }


def verdict(itl_ms: float, rows: list[dict[str, object]]) -> str:
    """Online against the fastest fixed budget that keeps 99 % of the gaps."""
    mine = [r for r in rows if r["itl_slo_ms"] == itl_ms]
    keeping = [r for r in mine if r["budget"] != ONLINE and float(str(r["gaps_kept"])) >= 0.99]
    online = next(r for r in mine if r["budget"] == ONLINE)
    text = f"{itl_ms:g} ms: online keeps {float(str(online['gaps_kept'])):.1%}"
    if not keeping:
        return f"{text}; no fixed budget keeps 99 %"
    best = min(keeping, key=lambda r: float(str(r["long_ttft_s"])))
    ratio = float(str(online["long_ttft_s"])) / float(str(best["long_ttft_s"]))
    return f"{text}; its TTFT is {ratio:.2f} of that of budget {best['budget']}, the best that does"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--itl-ms", type=float, nargs="+", default=[60.0, 100.0, 200.0])
    parser.add_argument("--budgets", type=int, nargs="+", default=[24, 48, 64, 96, 160, 256])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each stream")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a long prompt")
    parser.add_argument("--pause-s", type=float, default=3.0, help="streams run alone this long")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    loads = measure(args)
    rows = [row(setting, itl_ms, loads[setting, itl_ms]) for setting, itl_ms in loads]
    rows.sort(key=lambda r: float(str(r["itl_slo_ms"])))
    table = Table(title="Step budgets under three promises")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for values in rows:
        table.add_row(*(str(value) for value in values.values()))
    Console(width=200).print(table)
    verdicts = [verdict(itl_ms, rows) for itl_ms in args.itl_ms]
    print("\n".join(verdicts))
    print(f"written: {save('budget', rows, verdicts=verdicts).name}")


if __name__ == "__main__":
    main()
