"""What the benchmarks report: each figure defined once, where it is computed."""

import itertools
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Sequence
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
