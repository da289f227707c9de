"""What the benchmarks report: each figure defined once, where it is computed."""

import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass
class Record:
    """One request as its client saw it. Times are seconds on the client's clock."""

    name: str
    sent_at: float
    token_times: list[float] = field(default_factory=list)  # one per token, never per chunk
    error: str | None = None
    evenflow: dict[str, object] = field(default_factory=dict)  # where it ran and why
    num_prompt_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Request sent to first token received."""
        return self.token_times[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Every time between two tokens of the stream: ITL, none left out."""
        return [b - a for a, b in itertools.pairwise(self.token_times)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: a value that was really measured. NaN when there is none."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


@dataclass(frozen=True, slots=True)
class Slo:
    """What one request was promised."""

    ttft_s: float
    gap_s: float  # the p99 of the request's gaps stays below

    def is_met_by(self, record: Record) -> bool:
        """A request with an error meets nothing."""
        if record.error is not None or not record.token_times or record.ttft_s > self.ttft_s:
            return False
        return not record.gaps_s or percentile(record.gaps_s, 99) < self.gap_s


def goodput(records: Sequence[Record], slo_of: Callable[[Record], Slo], window_s: float) -> float:
    """Requests per second of the arrival window that got what they were promised."""
    return sum(slo_of(record).is_met_by(record) for record in records) / window_s


def tokens_per_s(records: Sequence[Record], from_s: float, to_s: float) -> float:
    """Tokens that arrived in this window, over all records."""
    arrived = sum(from_s <= at < to_s for record in records for at in record.token_times)
    return arrived / (to_s - from_s)


def gaps_within(records: Sequence[Record], from_s: float, to_s: float) -> list[float]:
    """Every gap that overlaps this window, with its whole length."""
    return [
        b - a
        for record in records
        for a, b in itertools.pairwise(record.token_times)
        if b > from_s and a < to_s
    ]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and spread of what was measured several times."""
    shown = {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }
    return {key: float(f"{value:.4g}") for key, value in shown.items()} | {"num": len(values)}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, first column to the left, figures to the right."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def machine() -> dict[str, object]:
    """Where a figure was measured."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() or "unknown"


def save(name: str, rows: list[dict[str, object]], **about: object) -> Path:
    """One JSON line per run, appended, with commit and machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    line = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        **machine(),
        **about,
        "rows": rows,
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return path
