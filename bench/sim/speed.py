"""How fast virtual time runs, and what an event costs as the cluster grows.

    python -m bench.sim.speed [--requests 1000000] [--workers 64] [--whole]

Requests have the lengths of the twin's default chat mix (mean 1,020 in, 210 out, as Azure's
conversation trace of 2023); each worker gets as many as keep it busy. Pages hold 64 tokens, as
``evenflow plan`` has them. ``--whole`` runs each size once more with a router that looks at every
worker for every request: what the few that it looks at otherwise cost in latency. Writes
``bench/results/sim_speed.jsonl``.
"""

import argparse
import random
import resource
import time
from dataclasses import replace

from bench.report import save
from bench.sim.cluster import Cluster, Pool
from bench.sim.latency import Coefficients
from bench.sim.worker import LLAMA_8B, WorkerSpec
from bench.sim.workload import Workload, poisson, synthetic
from serving.console import out
from workers.core.policy import Limits

MEAN_PROMPT, MEAN_OUTPUT = 1020, 210


def chats(num_requests: int, rate: float, seed: int = 0) -> Workload:
    rng = random.Random(seed)
    lengths = (
        (1 + int(rng.expovariate(1 / MEAN_PROMPT)), 1 + int(rng.expovariate(1 / MEAN_OUTPUT)))
        for _ in range(num_requests)
    )
    return synthetic("chats", lengths, poisson(rate, rng))


def run(num_requests: int, num_workers: int, per_worker: float, whole: bool) -> dict[str, object]:
    """Mixed workers; seconds are those of this process on its core."""
    layout = replace(LLAMA_8B, page_size=64)
    spec = WorkerSpec(Coefficients(), Limits(512, 256), num_pages=1500, layout=layout)
    workload = chats(num_requests, per_worker * num_workers)
    cluster = Cluster([Pool("mixed", num_workers, spec)], sees_all=whole)
    cpu, wall = time.process_time(), time.monotonic()
    result = cluster.run(workload)
    cpu_s, wall_s = time.process_time() - cpu, time.monotonic() - wall
    return {
        "workers": num_workers,
        "router_sees": "all workers" if whole else "some",
        "requests": num_requests,
        "finished": result.summary.num_finished,
        "attainment": round(result.summary.attainment, 4),
        "ttft_p50_ms": round(result.summary.ttft_p50_s * 1e3, 1),
        "ttft_p99_ms": round(result.summary.ttft_p99_s * 1e3, 1),
        "itl_p99_ms": round(result.summary.itl_p99_s * 1e3, 1),
        "tokens": result.summary.output_tokens,
        "events": result.num_events,
        "busy": round(result.summary.busy, 2),
        "cpu_s": round(cpu_s, 1),
        "wall_s": round(wall_s, 1),
        "us_per_request": round(cpu_s / num_requests * 1e6),
        "us_per_event": round(cpu_s / result.num_events * 1e6, 1),
        "us_per_token": round(cpu_s / max(1, result.summary.output_tokens) * 1e6, 2),
        "virtual_s": round(result.summary.span_s),
        "max_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast virtual time runs.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[64])
    parser.add_argument("--per-worker", type=float, default=8.0, help="requests/s for each worker")
    parser.add_argument("--whole", action="store_true", help="and with all workers in view")
    args = parser.parse_args()
    rows = []
    for count in args.workers:
        for whole in (False, True)[: 1 + args.whole]:
            rows.append(run(args.requests, count, args.per_worker, whole))
    for row in rows:
        out.print(", ".join(f"{key} {value}" for key, value in row.items()))
    save("sim_speed", rows)


if __name__ == "__main__":
    main()
