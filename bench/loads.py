"""The loads of the comparison: play one against a server, and turn what came back into figures.

A load gives a list of samples per figure, and knows nothing about the server but its dialect. If
a request fails there are no figures: ``LoadFailed`` says what happened. Only the open loops, where
a late answer is a result, count failures instead.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.client import Dialect, play
from bench.report import Record, Slo, gaps_within, goodput, percentile, tokens_per_s
from bench.workloads import (
    SHORT_PROMPT_TOKENS,
    Ask,
    Interference,
    at_once,
    poisson_mix,
    read_trace,
)

Samples = dict[str, list[float]]

SHORT_SLO = Slo(ttft_s=2.0, gap_s=0.150)
LONG_SLO = Slo(ttft_s=15.0, gap_s=0.150)
PATIENCE_S = 20.0  # after the last arrival of an open loop


def add(samples: Samples, more: Samples) -> None:
    """Put more samples of the same figures beside those that are there."""
    for name, values in more.items():
        samples.setdefault(name, []).extend(values)


class LoadFailed(Exception):
    """Requests of a closed load failed; the message says which and how."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each load."""

    repeat: int = 3
    prompts: tuple[int, ...] = (512, 2000, 4000)
    interference: Interference = field(default_factory=Interference)
    rates: tuple[float, ...] = (0.6, 0.9, 1.2)
    window_s: float = 30.0
    trace: Path | None = None
    trace_rate: float = 0.5
    trace_requests: int = 20


@dataclass(frozen=True, slots=True)
class Target:
    client: httpx.AsyncClient
    dialect: Dialect

    async def play(self, asks: Sequence[Ask], patience_s: float | None = None) -> list[Record]:
        return await play(self.client, asks, dialect=self.dialect, patience_s=patience_s)

    async def play_all(self, asks: Sequence[Ask]) -> list[Record]:
        """LoadFailed unless every request got all its tokens."""
        records = await self.play(asks)
        problems = Counter(f"{r.name.partition('-')[0]}: {r.error}" for r in records if r.error)
        if problems:
            text = "; ".join(f"{what} ({count}x)" for what, count in problems.most_common(3))
            raise LoadFailed(f"{problems.total()} of {len(records)} requests failed: {text}")
        return records


async def warm_up(target: Target) -> None:
    """Every code path once: a long prefill, decodes beside it, a batch."""
    await target.play_all([Ask("long", 0.0, 1500, 4, 1), *at_once(4, 64, 24, seed=2)])


async def single(target: Target, sizes: Sizes) -> Samples:
    """One stream: tokens per second from the request to the last token. Not from the first token:
    one that arrives late, with others behind it, must not look fast."""
    samples: Samples = {"decode_tok_s": []}
    for repeat in range(sizes.repeat):
        (record,) = await target.play_all(at_once(1, 32, 128, seed=10 + repeat))
        num_tokens, took_s = len(record.token_times), record.token_times[-1] - record.sent_at
        samples["decode_tok_s"].append(num_tokens / took_s)
    return samples


async def prefill(target: Target, sizes: Sizes) -> Samples:
    """Prompts alone: prompt tokens per second until the first token."""
    samples: Samples = {f"prefill_{num}_tok_s": [] for num in sizes.prompts}
    for repeat in range(sizes.repeat):
        for num in sizes.prompts:
            (record,) = await target.play_all(at_once(1, num, 1, seed=20 + repeat))
            samples[f"prefill_{num}_tok_s"].append(num / record.ttft_s)
    return samples


async def prefix(target: Target, sizes: Sizes) -> Samples:
    """A prompt of 2,000 tokens, and the same once more: what the prefix cache saves."""
    samples: Samples = {"cold_ttft_s": [], "again_ttft_s": [], "again_times_faster": []}
    for repeat in range(sizes.repeat):
        asks = at_once(1, 2000, 4, seed=70 + repeat)
        (cold,), (again,) = await target.play_all(asks), await target.play_all(asks)
        samples["cold_ttft_s"].append(cold.ttft_s)
        samples["again_ttft_s"].append(again.ttft_s)
        samples["again_times_faster"].append(cold.ttft_s / again.ttft_s)
    return samples


async def throughput(target: Target, sizes: Sizes) -> Samples:
    """Sixteen at once, 128 tokens in and 128 out: output tokens per second, first send to last."""
    samples: Samples = {"throughput_tok_s": []}
    for repeat in range(sizes.repeat):
        records = await target.play_all(at_once(16, 128, 128, seed=30 + repeat))
        began, ended = min(r.sent_at for r in records), max(r.token_times[-1] for r in records)
        num_tokens = sum(len(r.token_times) for r in records)
        samples["throughput_tok_s"].append(num_tokens / (ended - began))
    return samples


async def interference(target: Target, sizes: Sizes) -> Samples:
    """Long prompts among streams; every cycle of one long prompt is a sample."""
    plan = sizes.interference
    records = await target.play_all(plan.asks(seed=40))
    streams = records[: plan.num_streams]
    longs = records[plan.num_streams :][: plan.num_longs]
    shorts = records[plan.num_streams + plan.num_longs :]
    start = streams[0].sent_at
    quiet_from = start + plan.lead_s / 2  # the streams' own prefills are over
    samples: Samples = {
        "longest_gap_s": [],
        "p99_gap_during_s": [],
        "long_ttft_s": [record.ttft_s for record in longs],
        "short_behind_ttft_s": [record.ttft_s for record in shorts],
        "background_tok_s": [],
        "quiet_tok_s": [tokens_per_s(streams, quiet_from, start + plan.lead_s)],
    }
    for cycle, long in enumerate(longs):
        until = start + plan.due_s(cycle + 1)
        first = long.token_times[0]
        samples["longest_gap_s"].append(max(gaps_within(streams, long.sent_at, until)))
        during = gaps_within(streams, long.sent_at, first)
        samples["p99_gap_during_s"].append(percentile(during, 99))
        samples["background_tok_s"].append(tokens_per_s(streams, long.sent_at, first))
    return samples


async def poisson(target: Target, sizes: Sizes) -> Samples:
    """Short and long requests at random times, at each rate: goodput, and what was missed."""
    samples: Samples = {}
    for repeat in range(sizes.repeat):
        for i, rate in enumerate(sizes.rates):
            # no two windows have a prompt in common, so that no prefix cache helps
            seed = 1000 + repeat * len(sizes.rates) + i
            asks = poisson_mix(rate, sizes.window_s, seed)
            records = await target.play(asks, PATIENCE_S)
            add(samples, _open_loop_samples(records, sizes.window_s, f"at_{rate:g}"))
            await target.play_all(at_once(1, 32, 1, seed=60))  # behind whatever is left over
    return samples


async def trace(target: Target, sizes: Sizes) -> Samples:
    """The first requests of a recorded trace, its clock scaled."""
    assert sizes.trace is not None, "asked for without a path"
    rate = sizes.trace_rate
    replay = read_trace(sizes.trace, sizes.trace_requests, rate, max_total_tokens=6000)
    records = await target.play(replay.asks, PATIENCE_S)
    return _open_loop_samples(records, len(replay.asks) / rate, "trace")


def slo_of(record: Record) -> Slo:
    return SHORT_SLO if record.num_prompt_tokens <= SHORT_PROMPT_TOKENS else LONG_SLO


def _open_loop_samples(records: list[Record], window_s: float, name: str) -> Samples:
    gaps = [gap for record in records for gap in record.gaps_s]
    short = [r.ttft_s for r in records if r.token_times and slo_of(r) is SHORT_SLO]
    return {
        f"goodput_{name}": [goodput(records, slo_of, window_s)],
        f"asked_{name}": [len(records) / window_s],
        f"errors_{name}": [float(sum(record.error is not None for record in records))],
        f"short_ttft_p90_s_{name}": [percentile(short, 90)],
        f"p99_gap_s_{name}": [percentile(gaps, 99)],
    }


LOADS = {
    "single": single,
    "prefill": prefill,
    "prefix": prefix,
    "throughput": throughput,
    "interference": interference,
    "poisson": poisson,
    "trace": trace,
}
