"""Plan a cluster before buying it: ``evenflow plan``, on the live code in virtual time.

    evenflow plan --trace FILE --model llama-3.1-8b --gpu h100 --gpus 24

Prints the best plan of each mode, how far to trust it, and the smallest cluster; writes a plot and
a configuration for ``evenflow serve --config``.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from matplotlib import use
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.sim import catalogue
from bench.sim.catalogue import Times
from bench.sim.latency import Coefficients
from bench.sim.planner import (
    Advice,
    Candidate,
    Confidence,
    Estimate,
    Plan,
    Planner,
    Trial,
    config_of,
    usual_runs,
)
from bench.sim.workload import TraceError, Workload, load
from serving import console
from serving.config import ConfigError, load_config, seconds
from workers.core.request import SLO

use("Agg")  # no screen needed

from matplotlib import pyplot

DEFAULT_TRACE_RATE = 1.0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evenflow plan", description=(__doc__ or "").split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--trace", type=Path, required=True, help="what serve --record wrote, "
                        "Mooncake's or Qwen-Bailian's JSONL, Azure's or BurstGPT's CSV, or a CSV "
                        "of lengths (with --rate)")  # fmt: skip
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in bench/catalogue")
    parser.add_argument("--gpu", default="h100", help="a name in bench/catalogue")
    parser.add_argument("--gpus", type=int, default=8, help="how many there are")
    parser.add_argument("--slo-ttft", default="2s", help="promised time to first token")
    parser.add_argument("--slo-itl", default="100ms", help="promised gap between tokens")
    parser.add_argument("--rate", type=float, help="requests/s instead of the trace's own")
    parser.add_argument("--target", type=float, default=0.9, help="part that keeps both promises")
    parser.add_argument("--latency", type=Path, help="JSON of step-time coefficients instead of "
                        "the catalogue's: fixed_s, prefill_token_s, ...")  # fmt: skip
    parser.add_argument("--config-out", type=Path, default=Path("evenflow-plan.yaml"))
    parser.add_argument("--plot-out", type=Path, default=Path("evenflow-plan.png"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="for machines: no table")
    return parser.parse_args(argv)


def read_workload(args: argparse.Namespace, longest: int) -> Workload:
    """The trace at the wanted rate, without requests that no worker could hold."""
    workload = load(args.trace, args.rate or DEFAULT_TRACE_RATE, args.seed).fitting(longest)
    if len(workload.arrivals) < 2 or not workload.span_s:
        raise TraceError(f"{args.trace}: fewer than two requests fit {longest} tokens")
    return workload.at_rate(args.rate) if args.rate else workload


def times_source(args: argparse.Namespace) -> Any:
    """Times by tensor-parallel size."""
    model, gpu = catalogue.model(args.model), catalogue.gpu(args.gpu)
    if args.latency is None:
        return lambda tp: catalogue.times(model, gpu, tp)
    given = Coefficients(**json.loads(args.latency.read_text()))
    by_hand = Times(replace(given, link=gpu.link), 0.0, f"coefficients of {args.latency}", 0.1)
    return lambda tp: by_hand


def search(args: argparse.Namespace, slo: SLO, workload: Workload) -> Advice:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console.err, transient=True) as progress:
        task = progress.add_task("planning", total=None)

        def say(text: str) -> None:
            progress.update(task, description=text, advance=1)

        planner = Planner(
            catalogue.model(args.model),
            catalogue.gpu(args.gpu),
            times_source(args),
            workload,
            slo,
            args.gpus,
            target=args.target,
            seed=args.seed,
            say=say,
        )
        progress.update(task, total=usual_runs(sum(1 for _ in planner.plans())))
        return planner.search()


# ---------------------------------------------------------------------- telling


def table_of(advice: Advice, title: str) -> Table:
    table = Table(title=title)
    for name in ("mode", "workers", "TP", "budget"):
        table.add_column(name)
    for name in (
        "capacity /s", "goodput /s", "kept", "TTFT p50", "p99", "ITL p50", "p99",
        "GPU-s per 1k tokens", "cached",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for candidate in advice.by_mode.values():
        plan, seen = candidate.plan, candidate.at(advice.rate).summary
        table.add_row(
            plan.mode,
            plan.pools,
            str(plan.tp),
            str(plan.budget),
            f"{candidate.capacity:.3g}",
            f"{seen.goodput:.3g}",
            f"{seen.attainment:.1%}",
            _ms(seen.ttft_p50_s),
            _ms(seen.ttft_p99_s),
            _ms(seen.itl_p50_s),
            _ms(seen.itl_p99_s),
            f"{seen.gpu_s_per_1k_tokens:.2f}",
            f"{seen.cached_part:.0%}",
            style="bold" if candidate is advice.best else "",
        )
    return table


def lines_of(advice: Advice, times: Times, target: float, workload: Workload) -> list[str]:
    """What the table does not say."""
    best = advice.best
    lines = [
        f"{workload.name}: {len(workload.arrivals)} requests, {advice.rate:.3g}/s; {workload.how}",
        f"step times: {times.source}, taken to be within {times.error:.0%}",
    ]
    if advice.smallest is None:
        lines.append(f"no plan of this size keeps {target:.0%} at {advice.rate:.3g}/s")
    else:
        plan, seen = advice.smallest.plan, advice.smallest.summary
        lines.append(
            f"smallest {plan.mode} cluster that keeps {target:.0%} at {advice.rate:.3g}/s: "
            f"{plan.num_gpus} GPUs ({plan.pools}), keeps {seen.attainment:.1%}, "
            f"{seen.gpu_s_per_1k_tokens:.2f} GPU-seconds per 1k tokens; if every step is "
            f"{times.error:.0%} slower: {_gpus(advice.if_slower)}"
        )
    lines += sureness_of(advice.confidence, best.plan.mode)
    if best.plan.mode == "disaggregated":
        lines.append("for this plan every request asks for mode disaggregated")
    return lines


def sureness_of(seen: Confidence, mode: str) -> list[str]:
    """How far to trust the comparison; the step times have their own error."""
    on = f"at {seen.rate:.3g}/s, on {seen.num_slices} slices of the trace"
    lines = [f"confidence: {mode} keeps {_estimate(seen.kept)} {on}"]
    if seen.rival:
        lead, won = _estimate(seen.lead), f"{seen.num_won} of {seen.num_slices}"
        lines.append(f"it keeps {lead} more than {seen.rival}, no less in {won} slices")
    return lines


def _estimate(value: Estimate) -> str:
    return f"{value.mean:.1%} (± {value.within:.1%}, 95 % sure)"


def plot(advice: Advice, path: Path, target: float) -> None:
    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    for candidate in advice.by_mode.values():
        trials = sorted(candidate.trials, key=lambda trial: trial.rate)
        plan = candidate.plan
        label = f"{plan.mode}: {plan.pools}, budget {plan.budget}"
        rates = [trial.rate for trial in trials]
        kept = [trial.rate * trial.summary.attainment for trial in trials]
        axis.plot(rates, kept, "o-", label=label)
    top = max(trial.rate for c in advice.by_mode.values() for trial in c.trials)
    axis.plot([0, top], [0, target * top], ":", color="0.5", label=f"{target:.0%} of the rate")
    axis.axvline(advice.rate, color="0.8", label="the trace's rate")
    axis.set(xlabel="requests per second", ylabel="of these, keep both promises per second")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_config(plan: Plan, slo: SLO, path: Path, about: str) -> None:
    head = f"# {about}\n"
    if plan.tp > 1:
        head += f"# Each worker is a tensor-parallel group of {plan.tp} GPUs.\n"
    if plan.mode == "disaggregated":
        head += "# Requests ask for evenflow.mode: disaggregated.\n"
    path.write_text(head + yaml.safe_dump(config_of(plan, slo), sort_keys=False))
    load_config(path)  # what serve would say about it


def as_json(advice: Advice, times: Times) -> dict[str, Any]:
    def told(candidate: Candidate) -> dict[str, Any]:
        return {
            "plan": asdict(candidate.plan),
            "capacity": candidate.capacity,
            "trials": [{"rate": t.rate, **asdict(t.summary)} for t in candidate.trials],
        }

    return {
        "rate": advice.rate,
        "best": told(advice.best),
        "by_mode": {mode: told(candidate) for mode, candidate in advice.by_mode.items()},
        "confidence": asdict(advice.confidence),
        "smallest": asdict(advice.smallest) if advice.smallest else None,
        "step_times": {"source": times.source, "error": times.error},
        "smallest_if_slower": asdict(advice.if_slower) if advice.if_slower else None,
        "num_runs": advice.num_runs,
    }


def _gpus(trial: Trial | None) -> str:
    return f"{trial.plan.num_gpus} GPUs" if trial else "more than there are"


def _ms(value_s: float) -> str:
    return f"{value_s * 1000:.0f} ms" if value_s < 10 else f"{value_s:.0f} s"


def plan(args: argparse.Namespace) -> None:
    slo = SLO(seconds(args.slo_ttft, "--slo-ttft"), seconds(args.slo_itl, "--slo-itl"))
    model, start = catalogue.model(args.model), time.monotonic()
    workload = read_workload(args, model.max_model_len)
    advice = search(args, slo, workload)
    best, times = advice.best, times_source(args)(advice.best.plan.tp)
    about = f"evenflow plan for {args.model} on {args.gpus} {args.gpu}, {workload.name}"
    write_config(best.plan, slo, args.config_out, about)
    plot(advice, args.plot_out, args.target)
    if args.json:
        console.out.print_json(json.dumps(as_json(advice, times)))
        return
    promise = f"TTFT {args.slo_ttft}, ITL {args.slo_itl}"
    console.out.print(table_of(advice, f"{args.model} on {args.gpus} {args.gpu}, {promise}"))
    for line in lines_of(advice, times, args.target, workload):
        console.out.print(line)
    took = f"{advice.num_runs} runs in {time.monotonic() - start:.0f} s"
    console.out.print(f"{took}; wrote {args.config_out} and {args.plot_out}")


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        plan(args)
    except (ConfigError, TraceError, catalogue.CatalogueError) as error:
        console.problem(str(error))
        return 2
    except ValueError as error:
        console.problem(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
