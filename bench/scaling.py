"""Whether the autoscaler holds what it promises, and what it is worth. All in virtual time.

    python -m bench.scaling scenarios [--seeds 20]     twelve loads, each promise of each run
    python -m bench.scaling compare                    against Ray Serve's policy and static fleets

``scenarios`` writes ``bench/results/scaling_scenarios.md``, ``compare``
``bench/results/scaling_compare.md``, and both a line of ``bench/results/scaling.jsonl``; they end
with a failure when a promise is broken.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from bench.report import RESULTS, commit, markdown, save
from bench.sim.scaling_compare import Row, compare
from bench.sim.scenarios import SCENARIOS, judge
from serving.console import out

Judged = tuple[int, float, float, int, list[str]]


def _judge(task: tuple[int, int]) -> Judged:
    """In a process of its own: what of a verdict is shown."""
    index, seed = task
    verdict = judge(SCENARIOS[index], seed)
    scaled = verdict.scaled
    attainment = scaled.result.summary.attainment
    return index, attainment, scaled.gpu_hours, len(scaled.events), verdict.broken


def scenarios(num_seeds: int, num_processes: int) -> bool:
    """Whether every promise held in every run."""
    tasks = [(index, seed) for index in range(len(SCENARIOS)) for seed in range(num_seeds)]
    rows, broken = [], []
    by_index: dict[int, list[Judged]] = {}
    with ProcessPoolExecutor(num_processes) as processes:
        for (index, seed), judged in zip(tasks, processes.map(_judge, tasks), strict=True):
            by_index.setdefault(index, []).append(judged)
            name = SCENARIOS[index].name
            broken += [f"{name}, seed {seed}: {promise}" for promise in judged[4]]
            if seed == num_seeds - 1:
                rows.append(_row(name, by_index[index]))
                out.print(" | ".join(rows[-1]))
    header = ("scenario", "runs", "kept all", "TTFT and ITL kept", "GPU-hours", "events a run")
    text = f"{num_seeds} seeds each, commit {commit()}\n\n{markdown(header, rows)}"
    text += "\nBroken promises:\n\n" + ("\n".join(f"- {b}" for b in broken) or "none") + "\n"
    _write("scaling_scenarios", text)
    figures: list[dict[str, object]] = [dict(zip(header, row, strict=True)) for row in rows]
    save("scaling", figures, what="scenarios", broken=broken)
    out.print("\n".join(broken) or "every promise was kept")
    return not broken


def _row(name: str, runs: Sequence[Judged]) -> tuple[str, ...]:
    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(runs)

    return (
        name,
        str(len(runs)),
        str(sum(not run[4] for run in runs)),
        f"{mean(run[1] for run in runs):.3f}",
        f"{mean(run[2] for run in runs):.2f}",
        f"{mean(run[3] for run in runs):.1f}",
    )


def comparison(folder: Path, num_processes: int, say: Callable[[str], None]) -> bool:
    """Whether it beats Ray Serve's default, and comes near the best static fleet for less."""
    holds, text = True, f"commit {commit()}\n"
    figures: list[dict[str, object]] = []
    for table in compare(folder, num_processes, say):
        rows = [_compared(row) for row in table.rows]
        header = ("fleet", "both kept", "TTFT kept", "ITL kept", "GPU-hours", "changes")
        text += (
            f"\n## {table.title}\n\n{table.about}\n\n{markdown(header, rows)}\n{table.verdict}\n"
        )
        figures += [{"load": table.title, **asdict(row)} for row in table.rows]
        holds &= table.holds
    _write("scaling_compare", text)
    save("scaling", figures, what="compare")
    out.print(text)
    return holds


def _compared(row: Row) -> tuple[str, ...]:
    kept = (row.attainment, row.ttft, row.itl)
    return row.name, *(f"{part:.3f}" for part in kept), f"{row.gpu_hours:.2f}", str(row.num_events)


def _write(name: str, text: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="The autoscaler in virtual time.")
    parser.add_argument("what", choices=("scenarios", "compare"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.what == "scenarios":
        holds = scenarios(args.seeds, args.processes)
    else:
        holds = comparison(args.traces, args.processes, out.print)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
