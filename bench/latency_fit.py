"""How well the latency model predicts the steps of a real model.

    python -m bench.latency_fit

Runs random mixed batches on the runner that workers use, at one and at two threads: half of them to
learn from, half held out. Then a busy process per core takes the machine away, and the model has a
hundred steps to follow. Writes ``bench/results/latency_fit.jsonl``.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from bench.report import percentile, save
from workers.calibrate import Bounds, random_plan
from workers.core.latency import GUESS, LatencyModel, features
from workers.core.plan import BatchShape
from workers.core.regression import Memory, solve
from workers.runner import ModelRunner, load_runner
from workers.weights import resolve

NUM_PAGES = 1024
SLOW_STEPS = 100
Step = tuple[BatchShape, float]


def measure(
    runner: ModelRunner, rng: random.Random, num_steps: int
) -> Iterator[tuple[BatchShape, float]]:
    """Random batches, and the seconds that each took."""
    bounds = Bounds(NUM_PAGES, runner.cache.layout.page_size, vocab_size=runner.vocab_size)
    for _ in range(num_steps):
        plan = random_plan(rng, bounds)
        chunks = plan.chunks
        start = time.perf_counter()
        runner.run(chunks)
        yield plan.shape, time.perf_counter() - start
        for chunk in chunks:
            runner.forget(chunk.seq.id)


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """So many processes that never wait."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def follow(model: LatencyModel, steps: Iterator[Step]) -> list[float]:
    """Errors of the predictions made before each step was learned from."""
    errors = []
    for shape, took_s in steps:
        errors.append(abs(model.step_s(shape) / took_s - 1))
        model.observe(shape, took_s)
    return errors


def form(steps: list[Step], held_out: list[Step], columns: list[int]) -> float:
    """Median error on ``held_out`` of a form with only these features, fitted to ``steps``."""
    memory = Memory(len(columns), 1e9)
    for shape, took_s in steps:
        memory.add([features(shape)[i] for i in columns], took_s)
    prior = [GUESS[i] for i in columns]
    found = solve([memory], prior, prior, 1e-6)
    return statistics.median(
        abs(sum(c * features(shape)[i] for c, i in zip(found, columns, strict=True)) / took_s - 1)
        for shape, took_s in held_out
    )


def row(threads: int, args: argparse.Namespace) -> dict[str, object]:
    runner = load_runner(resolve(), dtype=args.dtype, threads=threads, num_pages=NUM_PAGES)
    rng, model = random.Random(args.seed), LatencyModel()
    learned = list(measure(runner, rng, args.steps))
    follow(model, iter(learned))
    held_out = list(measure(runner, rng, args.steps))
    frozen = [abs(model.step_s(shape) / took_s - 1) for shape, took_s in held_out]
    online = follow(model, iter(held_out))
    with busy(args.busy):
        slow = follow(model, measure(runner, rng, SLOW_STEPS))
    recovered = follow(model, measure(runner, rng, SLOW_STEPS))
    every = list(range(len(GUESS)))
    return {
        "threads": threads,
        "steps": args.steps,
        "backend": runner.attention.name,
        "median_error": round(statistics.median(frozen), 3),
        "p95_error": round(percentile(frozen, 95), 3),
        "online_median": round(statistics.median(online), 3),
        "online_p95": round(percentile(online, 95), 3),
        "slow_first_5": round(statistics.median(slow[:5]), 3),
        "slow_steps_76_100": round(statistics.median(slow[75:]), 3),
        "back_76_100": round(statistics.median(recovered[75:]), 3),
        "all_features": round(form(learned, held_out, every), 3),
        "without_knee": round(form(learned, held_out, every[:-1]), 3),
        "without_q_and_k": round(form(learned, held_out, [0, 1, 3, 5]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--steps", type=int, default=250, help="to learn from, and held out")
    parser.add_argument("--busy", type=int, default=2, help="processes that slow the machine down")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows = [row(threads, args) for threads in args.threads]
    table = Table(title="Relative error of predicted step times")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for values in rows:
        table.add_row(*(str(value) for value in values.values()))
    Console(width=200).print(table)
    print(f"written: {save('latency_fit', rows).name}")


if __name__ == "__main__":
    main()
