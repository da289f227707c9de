"""Who asks when for how much: traces and synthetic arrivals as one list of ``Arrival``.

Contents are named, never spelled out: a prompt is a list of block names, and two prompts whose
first blocks have the same names share a prefix.
"""

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

R = TypeVar("R")
A = TypeVar("A")

MOONCAKE_BLOCK, QWEN_BLOCK = 512, 16  # tokens named by one hash id


class TraceError(ValueError):
    """A file that cannot be read as what it should be; the message names file and line."""


class Arrival(NamedTuple):
    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()  # names of the prompt's blocks; empty: shares with nobody


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in the order of time."""

    name: str
    arrivals: tuple[Arrival, ...]
    block_size: int = MOONCAKE_BLOCK
    how: str = ""  # what was done to the timestamps

    @property
    def has_content(self) -> bool:
        return any(arrival.blocks for arrival in self.arrivals)

    @property
    def span_s(self) -> float:
        return self.arrivals[-1].at_s - self.arrivals[0].at_s if self.arrivals else 0.0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return (len(self.arrivals) - 1) / self.span_s if self.span_s else 0.0

    def prompt(self, arrival: Arrival) -> tuple[int, ...]:
        """Token ids that agree with another prompt's exactly as far as its blocks do."""
        if not arrival.blocks:
            return _anything(arrival.num_prompt)
        ids: list[int] = []
        for name in arrival.blocks:
            ids += [name] * self.block_size
        missing = arrival.num_prompt - len(ids)
        return tuple(ids[: arrival.num_prompt]) + (arrival.blocks[-1],) * max(0, missing)

    def first(self, num_requests: int) -> "Workload":
        return self.part(0, num_requests)

    def part(self, start: int, stop: int) -> "Workload":
        """Requests [start, stop) in the order of time."""
        return replace(self, arrivals=self.arrivals[start:stop])

    def at_rate(self, rate: float) -> "Workload":
        """The same requests in the same order, faster or slower as a whole."""
        factor = self.rate / rate
        start = self.arrivals[0].at_s
        moved = tuple(a._replace(at_s=(a.at_s - start) * factor) for a in self.arrivals)
        return replace(self, arrivals=moved, how=f"{self.how}; time scaled to {rate:.3g}/s")

    def fitting(self, max_tokens: int) -> "Workload":
        """Without requests that are longer than ``max_tokens``."""
        kept = tuple(a for a in self.arrivals if a.num_prompt + a.num_output <= max_tokens)
        return replace(self, arrivals=kept)


@lru_cache(maxsize=65536)
def _anything(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


# ---------------------------------------------------------------------- arrivals


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Times of independent arrivals, ``rate`` a second."""
    return gamma(rate, 1.0, rng)


def gamma(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Times whose gaps are Gamma distributed; ``cv`` above 1 is burstier than Poisson."""
    if rate <= 0 or cv <= 0:
        raise ValueError(f"{rate=} and {cv=} must be above zero")
    now, shape = 0.0, 1 / cv**2
    while True:
        now += rng.gammavariate(shape, 1 / (rate * shape))
        yield now


def synthetic(
    name: str, lengths: Iterable[tuple[int, int]], times: Iterator[float], how: str = ""
) -> Workload:
    """A request of each (prompt, output) length at each of the times."""
    pairs = zip(lengths, times, strict=False)
    arrivals = tuple(Arrival(at, prompt, output) for (prompt, output), at in pairs)
    return Workload(name, arrivals, how=how)


# ---------------------------------------------------------------------- files


def load_lengths(path: Path, rate: float, seed: int = 0, cv: float = 1.0) -> Workload:
    """A CSV of prompt and output lengths (first two columns), in file order, with Poisson arrivals
    (or Gamma, for another ``cv``)."""
    with path.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        lengths = list(_numbered(path, rows, lambda row: (int(row[0]), int(row[1]))))
    how = f"arrivals drawn: Gamma with cv {cv:g}, {rate:g}/s, seed {seed}"
    return synthetic(path.stem, lengths, gamma(rate, cv, random.Random(seed)), how)


def load_azure(path: Path) -> Workload:
    """TIMESTAMP, ContextTokens, GeneratedTokens: exact times, no contents."""

    def read(row: list[str]) -> Arrival:
        at = datetime.fromisoformat(row[0][:26]).timestamp()
        return Arrival(at, int(row[1]), int(row[2]))

    with path.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        arrivals = _from_zero(_numbered(path, rows, read))
    return Workload(path.stem, arrivals, how="times as recorded")


def load_mooncake(path: Path, seed: int = 0, spread: bool = True) -> Workload:
    """Mooncake's JSONL. Its times come in buckets of about three seconds: ``spread`` draws each
    request's time uniformly between its bucket and the next, and keeps their order."""
    return _load_hashed(path, 1e-3, MOONCAKE_BLOCK, seed, spread)


def load_qwen(path: Path, seed: int = 0) -> Workload:
    """Qwen-Bailian's JSONL: ``timestamp`` in seconds, ``input_length``, ``output_length`` and
    ``hash_ids`` of 16 tokens each. Times that several requests share are spread uniformly until the
    next one that occurs."""
    return _load_hashed(path, 1.0, QWEN_BLOCK, seed, True)


def load_burstgpt(path: Path, seed: int = 0) -> Workload:
    """BurstGPT's CSV: seconds, model, request and response tokens, ... without contents. Its
    times are whole seconds: each is spread uniformly within its own. Requests that failed have no
    response tokens and are left out, as the trace's authors do."""

    def read(row: dict[str, str]) -> Arrival:
        tokens = float(row["Request tokens"]), float(row["Response tokens"])
        return Arrival(float(row["Timestamp"]), int(tokens[0]), int(tokens[1]))

    with path.open(newline="") as file:
        arrivals = _from_zero(_numbered(path, csv.DictReader(file), read))
    how = f"times spread uniformly within their second, seed {seed}"
    return Workload(path.stem, _spread(arrivals, random.Random(seed), 1.0), how=how)


def load_recording(path: Path) -> Workload:
    """What ``evenflow serve --record`` wrote (serving/recording.py), in the order of arrival.
    Requests that were refused or failed before their first token wanted an answer, too: they are
    given the median length of those that got one."""
    sizes: set[int] = set()

    def read(row: dict[str, Any]) -> Arrival:
        sizes.add(int(row.get("block_size", MOONCAKE_BLOCK)))
        names = tuple(_name(block) for block in row.get("blocks", ()))
        at = float(row["at_s"])
        return Arrival(at, int(row["prompt_tokens"]), int(row["output_tokens"]), names)

    with path.open() as file:
        rows = list(_numbered(path, map(json.loads, file), read))
    if len(sizes) > 1:
        raise TraceError(f"{path}: block_size differs between its lines: {sorted(sizes)}")
    usual = median([row.num_output for row in rows if row.num_output] or [1])
    arrivals = _from_zero(a._replace(num_output=a.num_output or round(usual)) for a in rows)
    return Workload(path.stem, arrivals, sizes.pop() if sizes else MOONCAKE_BLOCK, "as recorded")


def _load_hashed(path: Path, unit_s: float, block: int, seed: int, spread: bool) -> Workload:
    def read(row: dict[str, Any]) -> Arrival:
        blocks = tuple(_name(name) for name in row["hash_ids"])
        at = float(row["timestamp"]) * unit_s
        return Arrival(at, int(row["input_length"]), int(row["output_length"]), blocks)

    with path.open() as file:
        arrivals = _from_zero(_numbered(path, map(json.loads, file), read))
    if not spread:
        return Workload(path.stem, arrivals, block, "times in their buckets, as recorded")
    how = f"times spread uniformly within their buckets, seed {seed}"
    return Workload(path.stem, _spread(arrivals, random.Random(seed)), block, how)


def load(path: Path, rate: float = 1.0, seed: int = 0) -> Workload:
    """Any of the above, told apart by what the first line says."""
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    with path.open() as file:
        head = file.readline()
    if head.startswith("{"):
        if "hash_ids" not in head:
            return load_recording(path)
        return load_qwen(path, seed) if "chat_id" in head else load_mooncake(path, seed)
    if head.startswith("TIMESTAMP"):
        return load_azure(path)
    if head.startswith("Timestamp"):
        return load_burstgpt(path, seed)
    if "," in head:
        return load_lengths(path, rate, seed)
    raise TraceError(f"{path}: neither JSON lines nor CSV")


def _numbered(path: Path, rows: Iterable[R], read: Callable[[R], A]) -> Iterator[A]:
    """Each row as ``read`` understands it; an error names the line."""
    number = 0
    try:
        for row in rows:
            number += 1
            yield read(row)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise TraceError(f"{path}: row {number}: {error!r}") from error


def _from_zero(arrivals: Iterable[Arrival]) -> tuple[Arrival, ...]:
    ordered = sorted(arrivals, key=lambda arrival: arrival.at_s)
    start = ordered[0].at_s if ordered else 0.0
    return tuple(a._replace(at_s=a.at_s - start) for a in ordered if a.num_prompt and a.num_output)


def _spread(
    arrivals: tuple[Arrival, ...], rng: random.Random, width_s: float = math.inf
) -> tuple[Arrival, ...]:
    """Between each time and the next one, at most ``width_s`` on. The last bucket is as long as the
    one before."""
    buckets = [(at, list(group)) for at, group in groupby(arrivals, key=lambda a: a.at_s)]
    moved: list[Arrival] = []
    width = 0.0
    for i, (at, group) in enumerate(buckets):
        width = buckets[i + 1][0] - at if i + 1 < len(buckets) else width
        times = sorted(at + rng.random() * min(width, width_s) for _ in group)
        moved += [a._replace(at_s=time) for a, time in zip(group, times, strict=True)]
    return tuple(moved)


def _name(block: str | int) -> int:
    """A block's name as a number: recordings hold hexadecimal digests."""
    return int(block, 16) % 2**32 if isinstance(block, str) else block
