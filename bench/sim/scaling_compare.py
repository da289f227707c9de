"""The autoscaler against Ray Serve's queue-length policy and against every static fleet.

Two loads: Azure's code trace of 2023 (bursts of ten seconds), and the digitised day curve of Azure
2024 with the lengths of the conversation trace, played in ``CURVE_S``. The same requests, router,
workers, limits, period and start-up time for everybody; an elastic fleet begins with half of the
GPUs, a static one has them all from the first moment.
"""

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.sim.cluster import Cluster, Pool
from bench.sim.latency import Coefficients
from bench.sim.scaling import Decider, ElasticCluster, ElasticPool, QueueLength
from bench.sim.worker import WorkerSpec
from bench.sim.workload import Arrival, Workload, load_azure
from serving.core.autoscaler import Autoscaler
from serving.core.scaling import ScaleRules
from workers.core.policy import Limits
from workers.core.request import SLO

CURVE_S = 9000.0  # what the curve, of 84 hours, is played in
BUSIEST = 6.0  # requests a second
MAX_GPUS = 8
START_S = 30.0
LESS_GPU, NEAR = 0.80, 0.95  # of the best static fleet
NEARLY = 0.99
ALL = 0.97  # of the GPU-hours of a fleet that keeps every GPU
RAY_TARGETS = (2.0, 8.0, 16.0)
FAST = WorkerSpec(Coefficients(), Limits(2048, 256, online=True), num_pages=6000)
SLOW = WorkerSpec(  # as a model ten times larger
    Coefficients(3e-2, 5e-4, 1.5e-8, 2e-4, 5e-7), Limits(2048, 128, online=True), num_pages=6000
)


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, and where it comes from."""

    title: str
    about: str
    workload: Workload
    spec: WorkerSpec
    slo: SLO


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


def compare(folder: Path, num_processes: int, say: Callable[[str], None]) -> Iterator[Table]:
    """``folder`` has the traces."""
    for load in (bursty, daily):
        yield _table(load, folder, num_processes, say)


def bursty(folder: Path) -> Load:
    workload = load_azure(folder / "azure2023_code.first_half.csv")
    about = "Times and lengths as recorded; an 8B model on A100s, 2 s and 100 ms promised."
    return Load("Azure 2023, code", about, workload, FAST, SLO(2.0, 0.1))


def daily(folder: Path) -> Load:
    """The shape of the curve, at a rate that the busiest hour needs most of the GPUs for."""
    with (folder / "derived_azure2024_conv_rate_digitised.csv").open(newline="") as file:
        curve = [(float(row["t_s"]), float(row["inv_per_min_mid"])) for row in csv.DictReader(file)]
    lengths = load_azure(folder / "azure2023_conv.first_half.csv").arrivals
    times = _times(curve, busiest=BUSIEST, rng=random.Random(0))
    arrivals = tuple(Arrival(at, *lengths[i % len(lengths)][1:3]) for i, at in enumerate(times))
    about = (
        f"84 hours in {CURVE_S:.0f} s, lengths of the conversation trace of 2023; a model ten "
        "times slower than an 8B one on an A100, 4 s and 150 ms promised."
    )
    return Load("Day curve", about, Workload("days", arrivals), SLOW, SLO(4.0, 0.15))


def _times(curve: list[tuple[float, float]], busiest: float, rng: random.Random) -> Iterator[float]:
    """Poisson arrivals along the curve, squeezed and scaled."""
    squeeze = CURVE_S / curve[-1][0]
    most = max(rate for _, rate in curve)
    now, index = 0.0, 0
    while True:
        now += rng.expovariate(busiest)
        if now >= CURVE_S:
            return
        while index + 1 < len(curve) and curve[index + 1][0] * squeeze <= now:
            index += 1
        if rng.random() * most < curve[index][1]:
            yield now


@dataclass(frozen=True, slots=True)
class _Task:
    """One row of a table, for a process of its own."""

    load: Callable[[Path], Load]
    folder: Path
    name: str
    fleet: tuple[tuple[str, int], ...]  # static, or what an elastic one begins with
    decider: str = ""  # "", "ray" or "ours"
    target: float = 0.0  # of Ray's policy


def _table(
    load: Callable[[Path], Load], folder: Path, num_processes: int, say: Callable[[str], None]
) -> Table:
    about = load(folder)
    tasks = [*_ours(load, folder), *_ray(load, folder), *_static(load, folder)]
    rows = []
    with ProcessPoolExecutor(num_processes) as processes:
        for row in processes.map(_row, tasks):
            say(f"{row.name}: {row.attainment:.3f} kept, {row.gpu_hours:.2f} GPU-hours")
            rows.append(row)
    kinds = [task.decider for task in tasks]
    static, rays, ours = (
        [row for row, kind in zip(rows, kinds, strict=True) if kind == which]
        for which in ("", "ray", "ours")
    )
    table = Table(about.title, about.about, rows)
    verdicts = [judge(row, static, rays) for row in ours]
    table.verdict = "\n\n".join(text for _, text in verdicts)
    table.holds = any(holds for holds, _ in verdicts)
    say(table.verdict)
    return table


def judge(ours: Row, static: Sequence[Row], rays: Sequence[Row]) -> tuple[bool, str]:
    """Whether done-when 4 holds, and in words what there is to say. The first of ``rays`` is the
    default."""
    default, most = rays[0], max(row.gpu_hours for row in static)
    best = max(static, key=lambda row: (row.attainment, -row.gpu_hours))
    near = [row for row in static if row.attainment >= NEARLY * best.attainment]
    cheap = min(near, key=lambda row: (row.gpu_hours, -row.attainment))
    beats = ours.attainment > default.attainment and ours.gpu_hours < default.gpu_hours
    is_near = ours.attainment >= NEAR * best.attainment
    is_cheap = ours.gpu_hours <= LESS_GPU * best.gpu_hours
    better = [
        row.name
        for row in (*static, *rays)
        if row.attainment >= ours.attainment and row.gpu_hours <= ours.gpu_hours
    ]
    text = [
        f"{ours.name} keeps {ours.attainment:.3f} with {ours.gpu_hours:.2f} GPU-hours.",
        f"Against the best static fleet ({best.name}) that is {_against(ours, best)}: "
        f"{_said(is_near and is_cheap)}. Against the smallest that comes within 1 % of it "
        f"({cheap.name}), which one knows afterwards, {_against(ours, cheap)}.",
        f"Ray Serve's default keeps {default.attainment:.3f} with {default.gpu_hours:.2f}: "
        f"{_said(beats)}.",
    ]
    if default.gpu_hours >= ALL * most:
        text.append(
            "The default asks for every GPU almost at once and keeps it, as the largest static "
            "fleet does; with fewer GPU-hours nobody can keep more than that."
        )
    text.append(f"As much for less: {', '.join(better) or 'no other fleet'}.")
    return beats and is_near and is_cheap, " ".join(text)


def _against(ours: Row, other: Row) -> str:
    kept, hours = ours.attainment / other.attainment, ours.gpu_hours / other.gpu_hours
    return f"{kept:.1%} of the attainment with {hours:.0%} of the GPU-hours"


def _said(holds: bool) -> str:
    return "done-when 4 holds here" if holds else "done-when 4 does not hold here"


def _static(load: Callable[[Path], Load], folder: Path) -> Iterator[_Task]:
    """Mixed ones of more than half of the GPUs, and ratios of prefill to decode on all of them."""
    fleets: list[tuple[tuple[str, int], ...]] = [
        *((("mixed", num),) for num in range(MAX_GPUS // 2 + 1, MAX_GPUS + 1)),
        *((("prefill", n), ("decode", MAX_GPUS - n)) for n in range(3, 7)),
    ]
    for fleet in fleets:
        yield _Task(
            load, folder, "static, " + " + ".join(f"{n} {role}" for role, n in fleet), fleet
        )


def _ray(load: Callable[[Path], Load], folder: Path) -> Iterator[_Task]:
    for target in RAY_TARGETS:
        name = f"Ray Serve, {target:g} ongoing requests a replica"
        name += " (its default)" if target == RAY_TARGETS[0] else ""
        yield _Task(load, folder, name, (("mixed", MAX_GPUS // 2),), "ray", target)


def _ours(load: Callable[[Path], Load], folder: Path) -> Iterator[_Task]:
    half = MAX_GPUS // 2
    yield _Task(load, folder, "Evenflow, mixed", (("mixed", half),), "ours")
    split = (("prefill", half // 2), ("decode", half // 2))
    yield _Task(load, folder, "Evenflow, prefill and decode", split, "ours")


def _row(task: _Task) -> Row:
    load = task.load(task.folder)
    if not task.decider:
        pools = [Pool(role, number, load.spec) for role, number in task.fleet]
        summary = Cluster(pools, max_queue=1 << 20).run(load.workload, load.slo).summary
        hours, num_events = sum(n for _, n in task.fleet) * summary.span_s / 3600, 0
    else:
        elastic = [ElasticPool(role, n, 1, MAX_GPUS, load.spec) for role, n in task.fleet]
        ours = Autoscaler(ScaleRules(max_gpus=MAX_GPUS))
        decider: Decider = QueueLength(task.target) if task.decider == "ray" else ours
        cluster = ElasticCluster(elastic, decider, start_s=lambda _: START_S)
        scaled = cluster.run_scaled(load.workload, load.slo)
        summary, hours = scaled.result.summary, scaled.gpu_hours
        num_events = len(scaled.events)
    kept = summary.attainment, summary.attainment_ttft, summary.attainment_itl
    return Row(task.name, *kept, hours, num_events)
