"""The autoscaler against Ray Serve's queue-length policy and against every static fleet.

Two loads: Azure's code trace of 2023 (bursts of ten seconds), and the digitised day curve of Azure
2024 with the lengths of the conversation trace, each day played in ``DAY_S``.
"""

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.sim.cluster import Cluster, Pool
from bench.sim.latency import Coefficients
from bench.sim.outcome import Summary
from bench.sim.scaling import Decider, ElasticCluster, ElasticPool, QueueLength, Scaled
from bench.sim.worker import WorkerSpec
from bench.sim.workload import Arrival, Workload, load_azure
from serving.core.autoscaler import Autoscaler
from serving.core.scaling import ScaleRules
from workers.core.policy import Limits
from workers.core.request import SLO

DAY_S, NUM_DAYS = 1800.0, 2
MAX_GPUS = 8
START_S = 30.0
LESS_GPU, NEAR = 0.80, 0.95  # of the best static fleet
RAY_TARGETS = (2.0, 4.0, 8.0, 16.0)
MACHINE = WorkerSpec(  # an 8B model on an A100, three times slower: eight are not too many
    Coefficients(1.5e-2, 1.5e-4, 4e-9, 5e-5, 1.5e-7), Limits(2048, 128, online=True), num_pages=6000
)
SLOS = SLO(3.0, 0.1)


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, and where it comes from."""

    title: str
    about: str
    workload: Workload


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    attainment: float
    ttft: float
    itl: float
    gpu_hours: float
    num_events: int = 0


@dataclass(slots=True)
class Table:
    title: str
    about: str
    rows: list[Row]
    verdict: str = ""
    holds: bool = False


def compare(folder: Path, say: Callable[[str], None]) -> Iterator[Table]:
    """``folder`` has the traces."""
    for load in (bursty(folder), daily(folder)):
        say(f"{load.title}: {len(load.workload.arrivals)} requests")
        yield _table(load, say)


def bursty(folder: Path) -> Load:
    workload = load_azure(folder / "azure2023_code.first_half.csv")
    return Load("Azure 2023, code", "Times and lengths as recorded.", workload)


def daily(folder: Path) -> Load:
    """The shape of the curve, at a rate that the busiest hour needs most of the GPUs for."""
    with (folder / "derived_azure2024_conv_rate_digitised.csv").open(newline="") as file:
        curve = [(float(row["t_s"]), float(row["inv_per_min_mid"])) for row in csv.DictReader(file)]
    lengths = load_azure(folder / "azure2023_conv.first_half.csv").arrivals
    times = _times(curve, busiest=22.0, rng=random.Random(0))
    arrivals = tuple(Arrival(at, *lengths[i % len(lengths)][1:3]) for i, at in enumerate(times))
    about = f"{NUM_DAYS} days of {DAY_S:.0f} s each; lengths of the conversation trace of 2023."
    return Load("Day curve", about, Workload("days", arrivals))


def _times(curve: list[tuple[float, float]], busiest: float, rng: random.Random) -> Iterator[float]:
    """Poisson arrivals along the curve, squeezed and scaled."""
    squeeze = DAY_S / 86400
    most = max(rate for t, rate in curve if t * squeeze < NUM_DAYS * DAY_S)
    now, index = 0.0, 0
    while True:
        now += rng.expovariate(busiest)
        if now >= NUM_DAYS * DAY_S:
            return
        while index + 1 < len(curve) and curve[index + 1][0] * squeeze <= now:
            index += 1
        if rng.random() * most < curve[index][1]:
            yield now


def _table(load: Load, say: Callable[[str], None]) -> Table:
    static = [row for fleet in _fleets() if (row := _static(load, fleet, say))]
    best = max(static, key=lambda row: (round(row.attainment, 3), -row.gpu_hours))
    rays = [_ray(load, target, say) for target in RAY_TARGETS]
    mixed = _elastic(load, "Evenflow, mixed", ("mixed",), say)
    split = _elastic(load, "Evenflow, prefill and decode", ("prefill", "decode"), say)
    ours = max(mixed, split, key=lambda row: (row.attainment, -row.gpu_hours))
    table = Table(load.title, load.about, [*static, *rays, mixed, split])
    default = rays[0]
    beats = ours.attainment > default.attainment and ours.gpu_hours < default.gpu_hours
    near = ours.attainment >= NEAR * best.attainment
    less = ours.gpu_hours <= LESS_GPU * best.gpu_hours
    table.holds = beats and near and less
    table.verdict = (
        f"Best static: {best.name}. Ours ({ours.name}) keeps "
        f"{ours.attainment / best.attainment:.1%} of its promises with "
        f"{ours.gpu_hours / best.gpu_hours:.0%} of its GPU-hours; Ray Serve's default "
        f"{default.attainment:.3f} with {default.gpu_hours:.2f} GPU-hours."
    )
    say(table.verdict)
    return table


def _fleets() -> Iterator[dict[str, int]]:
    """All that fit, with every GPU in use: mixed ones, and every ratio of prefill to decode."""
    yield {"mixed": MAX_GPUS}
    for num in range(1, MAX_GPUS):
        yield {"prefill": num, "decode": MAX_GPUS - num}


def _static(load: Load, fleet: dict[str, int], say: Callable[[str], None]) -> Row | None:
    pools = [Pool(role, number, MACHINE) for role, number in fleet.items()]
    result = Cluster(pools, max_queue=1 << 20).run(load.workload, SLOS)
    hours = sum(fleet.values()) * result.summary.span_s / 3600
    name = "static, " + " + ".join(f"{number} {role}" for role, number in fleet.items())
    return _said(_row(name, result.summary, hours), say)


def _ray(load: Load, target: float, say: Callable[[str], None]) -> Row:
    name = f"Ray Serve, {target:g} ongoing requests a replica"
    name += " (its default)" if target == RAY_TARGETS[0] else ""
    return _scaled(load, name, ("mixed",), QueueLength(target), say)


def _elastic(load: Load, name: str, roles: tuple[str, ...], say: Callable[[str], None]) -> Row:
    return _scaled(load, name, roles, Autoscaler(ScaleRules(max_gpus=MAX_GPUS)), say)


def _scaled(
    load: Load, name: str, roles: tuple[str, ...], decider: Decider, say: Callable[[str], None]
) -> Row:
    pools = [ElasticPool(role, 1, 1, MAX_GPUS, MACHINE) for role in roles]
    cluster = ElasticCluster(pools, decider, start_s=lambda _: START_S)
    scaled: Scaled = cluster.run_scaled(load.workload, SLOS)
    row = _row(name, scaled.result.summary, scaled.gpu_hours, len(scaled.events))
    return _said(row, say)


def _row(name: str, summary: Summary, gpu_hours: float, num_events: int = 0) -> Row:
    kept = summary.attainment, summary.attainment_ttft, summary.attainment_itl
    return Row(name, *kept, gpu_hours, num_events)


def _said(row: Row, say: Callable[[str], None]) -> Row:
    say(f"{row.name}: {row.attainment:.3f} kept, {row.gpu_hours:.2f} GPU-hours")
    return row
