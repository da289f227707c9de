"""The online step budget against fixed ones, under three promises at once.

    python -m bench.budget

Eight streams; prompts of 4,000 tokens arrive, one alone and then some with a short prompt behind
each. The online budget is told the promised gap with each request; a fixed budget is measured once
and held against all three promises. At the end the same on two workers, one for prompts and one for
streams, with a core each. Writes ``bench/results/budget.jsonl``.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.client import fill, open_client, stream
from bench.report import Record, percentile, save
from bench.server import serving
from bench.workloads import prompt_of

SHORT_AFTER_S = 1.0  # behind a long one
SHORT_TOKENS = 60
STREAM_TOKENS = 4000  # more than any load takes
ONLINE, APART = "online", "online, disaggregated"


@dataclass(frozen=True, slots=True)
class Load:
    """What one setting made of the load."""

    streams: list[Record]
    alone: Record  # a long prompt
    followed: list[Record]  # others, with a short prompt behind each
    shorts: list[Record]

    @property
    def gaps_s(self) -> list[float]:
        return [gap for record in self.streams for gap in record.gaps_s]

    def kept(self, itl_s: float) -> float:
        """The part of all gaps that stay within the promise."""
        return sum(gap <= itl_s for gap in self.gaps_s) / len(self.gaps_s)


async def offer(url: str, itl_ms: float, args: argparse.Namespace, rounds: int, mode: str) -> Load:
    seed = iter(range(1, 1 << 20))
    want = {"mode": mode, "slo": {"ttft_ms": 2000, "itl_ms": itl_ms}}

    def new_prompt(num_tokens: int) -> list[int]:
        return prompt_of(num_tokens, round(time.time() * 1e3) + next(seed))

    async with open_client(url) as client:

        async def send(name: str, num_prompt: int) -> Record:
            return await stream(client, name, new_prompt(num_prompt), 8, evenflow=want)

        async def run(record: Record) -> None:
            await fill(client, record, new_prompt(32), STREAM_TOKENS, body={"evenflow": want})

        await send("warm-up", 300)
        streams = [Record(f"stream-{i}", time.perf_counter()) for i in range(args.streams)]
        tasks = [asyncio.create_task(run(record)) for record in streams]
        await asyncio.sleep(args.pause_s)
        load = Load(streams, await send("alone", args.prompt), [], [])
        for _ in range(rounds):
            await asyncio.sleep(args.pause_s)
            followed = asyncio.create_task(send("followed", args.prompt))
            await asyncio.sleep(SHORT_AFTER_S)
            load.shorts.append(await send("short", SHORT_TOKENS))
            load.followed.append(await followed)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    everybody = (*load.streams, load.alone, *load.followed, *load.shorts)
    if failed := [f"{record.name}: {record.error}" for record in everybody if record.error]:
        raise SystemExit("; ".join(failed))
    return load


def measure(args: argparse.Namespace) -> dict[tuple[str, float], Load]:
    """The load of each setting under each promise (ms)."""
    loads: dict[tuple[str, float], Load] = {}

    def play(
        name: str, itls_ms: list[float], rounds: int, *flags: str, mode: str = "mixed"
    ) -> None:
        with serving("--ray", "local", "--dtype", args.dtype, *flags) as url:
            for itl_ms in itls_ms:
                loads[name, itl_ms] = asyncio.run(offer(url, itl_ms, args, rounds, mode))

    one = ("--mixed", "1", "--prefill", "0", "--decode", "0")
    play(ONLINE, args.itl_ms, args.rounds, *one)
    for budget in map(str, args.budgets):
        play(budget, args.itl_ms[:1], 1, *one, "--max-num-batched-tokens", budget)
        loads |= {(budget, itl_ms): loads[budget, args.itl_ms[0]] for itl_ms in args.itl_ms}
    two = ("--mixed", "0", "--prefill", "1", "--decode", "1", "--threads", "1")
    play(APART, args.itl_ms[-2:-1], args.rounds, *two, mode="disaggregated")
    return loads


def row(setting: str, itl_ms: float, load: Load) -> dict[str, object]:
    followed_s = statistics.median(record.ttft_s for record in load.followed)
    return {
        "itl_slo_ms": itl_ms,
        "budget": setting,
        "gaps_kept": round(load.kept(itl_ms / 1e3), 4),
        "median_gap_s": round(percentile(load.gaps_s, 50), 4),
        "p99_gap_s": round(percentile(load.gaps_s, 99), 4),
        "long_ttft_s": round(load.alone.ttft_s, 2),
        "long_ttft_with_short_s": round(followed_s, 2),
        "worst_short_ttft_s": round(max(record.ttft_s for record in load.shorts), 3),
    }


def verdict(itl_ms: float, rows: list[dict[str, object]]) -> str:
    """Online against the fastest fixed budget that keeps 99 % of the gaps."""
    mine = [r for r in rows if r["itl_slo_ms"] == itl_ms]
    keeping = [
        r for r in mine if r["budget"] not in (ONLINE, APART) and float(str(r["gaps_kept"])) >= 0.99
    ]
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
    parser.add_argument(
        "--rounds", type=int, default=3, help="online: long prompts with a short one"
    )
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
