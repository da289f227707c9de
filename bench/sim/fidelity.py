"""A live run beside a simulated one of the same arrivals: how far to trust the twin, here and now.

Each layout is served once. A lone stream says what passes between steps and at the front door, a
burst says how much the layout can do; then a Poisson mix is offered at parts of that. The twin
plays the same arrivals with the step times that the live workers have learned by then, and nothing
else from the run.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from bench.client import OPENAI, Dialect, Event, open_client, play
from bench.report import Record, percentile
from bench.server import serving
from bench.sim.cluster import Cluster, Pool, Result
from bench.sim.latency import Link
from bench.sim.worker import WorkerSpec
from bench.sim.workload import Arrival, Workload
from bench.workloads import Ask, poisson_mix
from kvtransfer.core.handle import KVLayout
from workers.core.pace import Pace
from workers.core.plan import BatchShape
from workers.core.policy import Limits

LAYOUTS = {
    "mixed": ("--mixed", "1", "--prefill", "0", "--decode", "0"),
    "disaggregated": ("--mixed", "0", "--prefill", "1", "--decode", "1"),
}
LONE = Ask("lone", 0.0, 128, 48, 9_000_001)
BURST = 15  # requests of the mix, three of them long
SETTLE_S = 2.0  # after a load: the workers tell how fast they are twice a second
UNBOUNDED = 1 << 20


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one load. Seconds."""

    layout: str
    load: str
    figure: str
    measured: float
    twin: float

    @property
    def off(self) -> float:
        return self.twin / self.measured - 1


@dataclass(frozen=True, slots=True)
class PaceTimes:
    """What a live worker has learned, as step times; transfers at the rate that it saw."""

    pace: Pace
    link: Link

    def step_s(self, shape: BatchShape) -> float:
        return self.pace.step_s(shape)

    def transfer_s(self, num_bytes: int, pair: str = "") -> float:
        return self.link.transfer_s(num_bytes, pair)


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a lone stream took beyond its steps."""

    step_s: float  # between two steps
    front_s: float  # from the client to the first step, and back


def live_cells(
    layout: str, parts: Sequence[float], seconds: float, seed: int
) -> tuple[list[Cell], dict[str, object]]:
    """All figures of one layout, and what they rest on. Fails if a request does."""
    flags = [*LAYOUTS[layout], "--ray", "local"]
    with serving(*flags) as url:
        _play(url, layout, [LONE])  # warms caches and connections
        lone = _play(url, layout, [replace(LONE, seed=LONE.seed + 1)])[0]
        burst = [replace(a, at_s=0.0) for a in poisson_mix(1.0, 10 * BURST, seed)[:BURST]]
        capacity = BURST / _span_s(_play(url, layout, burst))
        loads: list[tuple[str, list[Ask], list[Record], list[Pool]]] = []
        for number, part in enumerate(parts, start=1):
            asks = poisson_mix(part * capacity, seconds, seed + number)
            records = _play(url, layout, asks)
            loads.append((f"{part:.0%}", asks, records, _pools(url)))
    overhead = overhead_of(lone, loads[-1][3], layout)
    cells: list[Cell] = []
    for load, asks, records, pools in loads:
        cells += compare(layout, load, records, simulate(pools, asks, layout, overhead), overhead)
    about = {
        "capacity_per_s": round(capacity, 3),
        "between_steps_s": round(overhead.step_s, 5),
        "front_s": round(overhead.front_s, 5),
        "requests": [len(asks) for _, asks, _, _ in loads],
    }
    return cells, about


# ---------------------------------------------------------------------- live


def _play(url: str, mode: str, asks: Sequence[Ask]) -> list[Record]:
    def body(prompt: list[int], max_tokens: int) -> Event:
        return {**OPENAI.body(prompt, max_tokens), "evenflow": {"mode": mode}}

    async def run() -> list[Record]:
        async with open_client(url) as client:
            records = await play(
                client, asks, dialect=Dialect(OPENAI.path, body, OPENAI.num_tokens)
            )
            await asyncio.sleep(SETTLE_S)
            return records

    records = asyncio.run(run())
    failed = [f"{record.name}: {record.error}" for record in records if record.error]
    if failed:
        raise RuntimeError("; ".join(failed))
    return records


def _span_s(records: Sequence[Record]) -> float:
    start = min(record.sent_at for record in records)
    return max(record.token_times[-1] for record in records) - start


def _pools(url: str) -> list[Pool]:
    """The live workers as the twin's, one pool each."""
    views = httpx.get(f"{url}/v1/evenflow/status", timeout=30).json()["workers"]
    return [Pool(view["role"], 1, spec_of(view)) for view in sorted(views, key=lambda v: v["id"])]


def spec_of(view: dict[str, Any]) -> WorkerSpec:
    told = view["pace"]
    pace = Pace(**{**told, "coefficients": tuple(told["coefficients"])})
    link = Link(pace.link_fixed_s, 1 / max(pace.link_byte_s, 1e-12))
    layout = KVLayout("live", 1, 1, pace.token_bytes // 4, view["page_size"], "bfloat16")
    limits = Limits(pace.max_tokens, pace.max_seqs, online=pace.is_online)
    longest = view["max_model_len"]
    return WorkerSpec(PaceTimes(pace, link), limits, view["num_pages"], layout, longest)


# ---------------------------------------------------------------------- simulated


def overhead_of(lone: Record, pools: Sequence[Pool], layout: str) -> Overhead:
    bare = simulate(pools, [LONE], layout, Overhead(0.0, 0.0))
    gap = percentile(lone.gaps_s, 50) - bare.gaps.percentile(50)
    front = lone.ttft_s - bare.outcomes[0].ttft_s
    return Overhead(max(0.0, gap), max(0.0, front))


def simulate(pools: Sequence[Pool], asks: Sequence[Ask], mode: str, overhead: Overhead) -> Result:
    arrivals = tuple(Arrival(a.at_s, a.num_prompt_tokens, a.max_tokens) for a in asks)
    slower = [replace(pool, spec=replace(pool.spec, host_s=overhead.step_s)) for pool in pools]
    cluster = Cluster(slower, mode=mode, max_queue=UNBOUNDED)
    return cluster.run(Workload("live", arrivals))


def compare(
    layout: str, load: str, records: Sequence[Record], twin: Result, overhead: Overhead
) -> list[Cell]:
    gaps = [gap for record in records for gap in record.gaps_s]
    measured = {
        "TTFT": [record.ttft_s for record in records],
        "end to end": [record.token_times[-1] - record.sent_at for record in records],
    }
    front = overhead.front_s
    ours = {
        "TTFT": [outcome.ttft_s + front for outcome in twin.outcomes],
        "end to end": [outcome.e2e_s + front for outcome in twin.outcomes],
    }
    cells = []
    for percent in (50, 95):
        for name, values in measured.items():
            pair = percentile(values, percent), percentile(ours[name], percent)
            cells.append(Cell(layout, load, f"{name} p{percent}", *pair))
        pair = percentile(gaps, percent), twin.gaps.percentile(percent)
        cells.append(Cell(layout, load, f"ITL p{percent}", *pair))
    return cells
