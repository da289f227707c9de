"""Clients that leave, at any moment: how many pages stay behind?

    python -m bench.aborts                  # 10,000 live ones, half of them disaggregated
    python -m bench.aborts --sim            # 1,000,000 in virtual time

Live: a prefill, a decode and a mixed worker of a tiny model, each a process, and a gateway here.
In virtual time: the twin, where every client leaves that has not been answered before; two workers
die and come back in each run. Writes ``bench/results/aborts.jsonl``.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from bench.calls import Answer, ask
from bench.processes import SMALL, Cluster
from bench.report import save
from bench.sim import cluster as sim
from bench.sim.faults import Faults
from bench.sim.latency import Coefficients
from bench.sim.worker import WorkerSpec
from bench.sim.workload import Arrival, Workload
from bench.tiny import tiny_model
from serving.config import Role
from workers.core.policy import Limits

ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "spare": "mixed"}
PER_RUN = 10_000
LEASE_S = 30.0  # so long that no page comes home by itself in time
CLEAN_S = 15.0


async def _leave(cluster: Cluster, rng: random.Random, name: str, met: Counter[str]) -> None:
    """One client, and where its request was when it left."""
    mode = "disaggregated" if rng.random() < 0.5 else "mixed"
    prompt = [rng.randrange(3, 49152) for _ in range(rng.randint(10, 300))]
    answer = Answer()
    call = ask(cluster.gateway, name, prompt, 64, mode, answer=answer)
    task = asyncio.create_task(call)
    await asyncio.wait({task}, timeout=rng.random() * rng.choice((0.02, 0.2, 1.0)))
    if task.done():
        met["answered before"] += 1
    elif len(answer.tokens) > 1:
        met[f"{mode}, decoding"] += 1
    elif answer.tokens:
        met[f"{mode}, after the first token"] += 1
    else:
        met[f"{mode}, before the first token"] += 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def live(num_aborts: int, at_once: int) -> dict[str, object]:
    rng, met = random.Random(5), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        config = replace(SMALL, num_pages=1024, lease_s=LEASE_S, transfer_timeout_s=5.0)
        cluster = Cluster(tiny_model(Path(folder), tokenizer=True), ROLES, config)
        try:
            await cluster.mend()

            async def client(number: int) -> None:
                turn = 0
                while met.total() - met["answered before"] < num_aborts:
                    await _leave(cluster, rng, f"{number}-{turn}", met)
                    turn += 1

            await asyncio.gather(*(client(i) for i in range(at_once)))
            with contextlib.suppress(TimeoutError):  # then the ledgers tell
                await cluster.until_clean(CLEAN_S)
            leaked = {name: 0 for name in ROLES}
            for name in ROLES:
                ledger = await cluster.pools.ledger(name)
                leaked[name] = ledger.num_pages - ledger.free
            running = sum(view.load.running_seqs for view in cluster.pools.workers())
        finally:
            await cluster.close()
    num = met.total() - met["answered before"]
    return {"num_aborts": num, "leaked_pages": sum(leaked.values()), "running": running, **met}


def _simulate(seed: int) -> tuple[int, int, int]:
    """Requests, clients that left, and workers with something left behind, of one run."""
    rng = random.Random(seed)
    spec = WorkerSpec(
        Coefficients(),
        Limits(rng.choice((64, 512)), 64),
        num_pages=rng.choice((96, 1000)),
        lease_s=rng.choice((1.0, 5.0)),
        transfer_timeout_s=0.5,
        prefix_caching=False,
    )
    faults = Faults(
        mean_life_s=60.0,
        transfer_fails=0.05,
        transfer_stalls=0.02,
        max_delay_s=rng.choice((0.0, 0.02)),
        aborts=1.0,
        max_patience_s=rng.choice((0.05, 0.3, 1.0)),
    )
    pools = [sim.Pool("prefill", 1, spec), sim.Pool("decode", 1, spec), sim.Pool("mixed", 1, spec)]
    arrivals, now = [], 0.0
    for _ in range(PER_RUN):
        now += rng.expovariate(60)
        arrivals.append(Arrival(now, rng.randint(1, 300), rng.randint(2, 60)))
    cluster = sim.Cluster(pools, faults=faults, seed=seed, max_queue=10**6)
    outcomes = cluster.run(Workload("aborts", tuple(arrivals))).outcomes
    num_left = sum(outcome.reason == "aborted" for outcome in outcomes)
    return len(outcomes), num_left, sum(not w.is_clean for w in cluster.workers.values())


def simulated(num_aborts: int) -> dict[str, object]:
    """Runs on all cores until enough clients have left. An invariant that fails ends it."""
    total = Counter[str]()
    with multiprocessing.get_context("spawn").Pool() as processes:
        for requests, left, dirty in processes.imap_unordered(
            _simulate, range(3 * num_aborts // PER_RUN + 3)
        ):
            total.update(num_requests=requests, num_aborts=left, workers_not_clean=dirty, runs=1)
            print(
                f"{total['num_aborts']} aborts, {total['workers_not_clean']} not clean", flush=True
            )
            if total["num_aborts"] >= num_aborts:
                processes.terminate()
                break
    return dict(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sim", action="store_true")
    parser.add_argument("--num", type=int, help="10,000; 1,000,000 simulated")
    parser.add_argument("--at-once", type=int, default=32)
    args = parser.parse_args()
    started = time.monotonic()
    if args.sim:
        row = simulated(args.num or 1_000_000)
    else:
        row = asyncio.run(live(args.num or 10_000, args.at_once))
    print(row)
    took_s = round(time.monotonic() - started)
    if not args.num:
        save("aborts", [row], kind="simulated" if args.sim else "live", took_s=took_s)
    print(f"in {took_s} s")


if __name__ == "__main__":
    main()
