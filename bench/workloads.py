"""What the benchmarks ask for, and when: pure values, the same for every server and every seed.

Prompts are random token ids, so no server's prefix cache helps, and the lengths are exact.
"""

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

VOCAB = 49152  # SmolLM2's
FIRST_TEXT_TOKEN = 1000  # below are special and single-byte tokens
SHORT_PROMPT_TOKENS = 512  # the border between the two service levels


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Times are seconds after the load's start."""

    name: str
    at_s: float
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    until_s: float | None = None  # the client leaves then; None: it stays to the end


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TEXT_TOKEN, VOCAB) for _ in range(num_tokens)]


def at_once(num: int, num_prompt_tokens: int, max_tokens: int, seed: int) -> list[Ask]:
    return [
        Ask(f"request-{i}", 0.0, num_prompt_tokens, max_tokens, seed * 1000 + i) for i in range(num)
    ]


@dataclass(frozen=True, slots=True)
class Interference:
    """Streams that last, and a long prompt among them every so often, a short one behind it."""

    num_streams: int = 8
    num_longs: int = 3
    long_tokens: int = 4000
    lead_s: float = 5.0  # the streams run alone
    period_s: float = 15.0
    short_after_s: float = 0.5

    def due_s(self, cycle: int) -> float:
        """When the long prompt of this cycle arrives; of the one after the last: the end."""
        return self.lead_s + cycle * self.period_s

    def asks(self, seed: int) -> list[Ask]:
        """The streams, then the long prompts, then the short ones."""
        end_s, cycles, seed = self.due_s(self.num_longs), range(self.num_longs), seed * 1000
        streams = [
            Ask(f"stream-{i}", 0.0, 32, 8000, seed + i, until_s=end_s)
            for i in range(self.num_streams)
        ]
        longs = [Ask("long", self.due_s(c), self.long_tokens, 16, seed + 100 + c) for c in cycles]
        shorts = [
            Ask("short", self.due_s(c) + self.short_after_s, 64, 16, seed + 200 + c) for c in cycles
        ]
        return [*streams, *longs, *shorts]


def poisson_mix(rate: float, duration_s: float, seed: int) -> list[Ask]:
    """``rate`` requests per second: 80 % of 128 tokens in and 64 out, 20 % of 2,000 in and 32 out.

    Of every five in a row one is long, so that short windows have the mix too."""
    rng = random.Random(seed)
    asks: list[Ask] = []
    at_s = rng.expovariate(rate)
    while at_s < duration_s:
        if len(asks) % 5 == 0:
            long_of_five = len(asks) + rng.randrange(5)
        is_long = len(asks) == long_of_five
        name, prompt, tokens = ("long", 2000, 32) if is_long else ("short", 128, 64)
        asks.append(Ask(name, at_s, prompt, tokens, seed * 100_000 + len(asks)))
        at_s += rng.expovariate(rate)
    return asks


@dataclass(frozen=True, slots=True)
class Trace:
    """The first requests of a recorded trace that fit the model."""

    asks: list[Ask]
    num_skipped: int  # longer than ``max_total_tokens``


def read_trace(path: Path, num: int, rate: float, max_total_tokens: int) -> Trace:
    """Lengths and order of arrival as recorded, the clock scaled to ``rate`` requests per second.

    Reads Azure's CSV, CSV with lengths only (arrivals are evenly spaced then) and Mooncake's JSON
    lines. Times in Mooncake's come in buckets of seconds; they are kept."""
    rows: list[tuple[float, int, int]] = []
    num_skipped = 0
    for row in _rows(path):
        if row[1] + row[2] > max_total_tokens or row[2] < 1:
            num_skipped += 1
            continue
        rows.append(row)
        if len(rows) == num:
            break
    if not rows:
        raise ValueError(f"{path}: no request fits {max_total_tokens} tokens")
    first, span = rows[0][0], rows[-1][0] - rows[0][0]
    scale = len(rows) / rate / span if span else 0.0
    asks = [
        Ask(f"trace-{i}", (at - first) * scale, prompt, tokens, 7_000_000 + i)
        for i, (at, prompt, tokens) in enumerate(rows)
    ]
    return Trace(asks, num_skipped)


def _rows(path: Path) -> Iterator[tuple[float, int, int]]:
    """Seconds, prompt tokens, output tokens."""
    with path.open(newline="") as file:
        if path.suffix == ".jsonl":
            for line in file:
                row = json.loads(line)
                yield row["timestamp"] / 1000, row["input_length"], row["output_length"]
            return
        for index, row in enumerate(csv.DictReader(file)):
            if "TIMESTAMP" in row:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                yield at, int(row["ContextTokens"]), int(row["GeneratedTokens"])
            else:
                yield float(index), int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])
