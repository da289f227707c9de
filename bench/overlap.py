"""Would it pay to plan the next step while this one runs? On a CPU whose cores all compute: no.

    python -m bench.overlap [--threads 2] [--host-ms 0.3] [--rounds 150]

Runs a decode step three ways in turn: alone, with so much of Python's time after it, and with the
same on another thread beside it. Beside it, the work takes a core from the kernels, which wait for
each other. Writes ``bench/results/overlap.jsonl``.
"""

import argparse
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from bench.micro import Load, chunks_of
from bench.report import markdown, save
from workers.core.plan import Chunk
from workers.runner import load_runner
from workers.threads import OnOneThread
from workers.weights import resolve

WAYS = ("alone", "after", "beside")
NUM_SEQS = (1, 16)
CONTEXT = 200


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Step:
    """One decode step, and work for the host that has to be done by its end."""

    def __init__(self, threads: int, host_s: float) -> None:
        runner = load_runner(resolve(), "bfloat16", num_pages=1100, threads=threads)
        self._runner, self._host_s = OnOneThread(runner, threads), host_s
        self._beside = ThreadPoolExecutor(
            1, "planner", os.sched_setaffinity, (0, os.sched_getaffinity(0))
        )
        self._beside.submit(threading.get_ident).result(timeout=10)  # it exists from here on

    def seconds(self, chunks: tuple[Chunk, ...], way: str) -> float:
        start = time.perf_counter()
        planned = self._beside.submit(busy, self._host_s) if way == "beside" else None
        self._runner.run(chunks)
        if way == "after":
            busy(self._host_s)
        if planned is not None:
            planned.result(timeout=10)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--host-ms", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=150)
    args = parser.parse_args()
    step, rows = Step(args.threads, args.host_ms / 1e3), list[dict[str, object]]()
    for num_seqs in NUM_SEQS:
        chunks = chunks_of(Load("decode", num_seqs, 1, CONTEXT))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                times[way].append(step.seconds(chunks, way))
        medians = {f"{way}_ms": round(statistics.median(times[way]) * 1e3, 2) for way in WAYS}
        rows.append({"sequences": num_seqs, **medians})
    columns = list(rows[0])
    print(markdown(columns, [[str(row[name]) for name in columns] for row in rows]))
    print(f"written to {save('overlap', rows, threads=args.threads, host_ms=args.host_ms)}")


if __name__ == "__main__":
    main()
