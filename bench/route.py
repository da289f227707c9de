"""Who wins where: every request mixed, every request disaggregated, or the router's choice each.

    python -m bench.route --traces ../shared/traces [--workers 4 8 32] [--requests 400]

The live router, schedulers and step budgets in virtual time, at several parts of what the cluster
could carry, for promises of several kinds. Disaggregated is given the best of several fixed splits
into prefill and decode workers at each point, found with hindsight. Auto is not: its roles are
those that did best on the requests before the measured ones, as ``evenflow plan`` would set them
(live, the autoscaler does); then it chooses for each request.

With hindsight are also ``threshold``, what others do (disaggregated from so many prompt tokens on,
the best of several numbers, with the best split; on small clusters only), and ``best``, the best of
all that was tried, auto with other roles included: ``regret`` is what auto misses of it. Writes
``bench/results/route.jsonl`` and ``route.md``.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from bench.report import RESULTS, markdown, save
from bench.sim.cluster import Cluster, Pool
from bench.sim.latency import Coefficients
from bench.sim.outcome import Summary
from bench.sim.worker import LLAMA_8B, WorkerSpec
from bench.sim.workload import Workload, load
from serving.console import out
from serving.core.router import AUTO, DISAGGREGATED, MIXED
from workers.core.budget import CEILING_S
from workers.core.policy import Limits
from workers.core.request import SLO, Request

MODEL = Coefficients()
MAX_TOKENS = 2048
LAYOUT = replace(LLAMA_8B, page_size=64)
SPEC = WorkerSpec(
    MODEL,
    Limits(max_tokens=MAX_TOKENS, max_seqs=256, online=True),
    num_pages=6000,
    layout=LAYOUT,
)
PER_WORKER = 50  # requests, at least
LONGEST = 60_000  # tokens of a request; longer ones are left out
SPLITS = (0.25, 0.5, 0.75)
LOADS = (0.5, 0.85, 1.2)
MANY, LOADS_OF_MANY = 16, (0.85,)  # workers, from which on there are fewer points
CLEARLY = 0.03  # of the requests
THRESHOLDS = (256, 1024, 3000)  # prompt tokens
FEW = 4  # workers, up to which thresholds are tried
SLOS = {
    "TTFT-tight": SLO(0.3, 0.1),
    "ITL-tight": SLO(2.0, 0.015),
    "both tight": SLO(0.5, 0.025),
    "loose": SLO(2.0, 0.1),
}
FILES = ("azure2023_conv.first_half.csv", "azure2023_code.first_half.csv")


@dataclass(frozen=True, slots=True)
class Means:
    """Seconds of computing that a workload's requests cost on the mean."""

    prompt_s: float
    stream_s: float

    def carried(self, itl_s: float) -> tuple[float, float]:
        """Requests a second and worker, all mixed and all disaggregated, if none ever waits and
        every step lasts as long as the promise allows."""
        useful = 1 - MODEL.fixed_s / min(itl_s, CEILING_S)
        alone = 1 - MODEL.fixed_s / (MODEL.fixed_s + MAX_TOKENS * MODEL.prefill_token_s)
        mixed = useful / (self.prompt_s + self.stream_s)
        return mixed, 1 / (self.prompt_s / alone + self.stream_s / useful)


def means_of(workload: Workload) -> Means:
    m = MODEL
    prompts = [
        m.prefill_token_s * a.num_prompt + m.attention_s * a.num_prompt**2 / 2
        for a in workload.arrivals
    ]
    streams = [
        a.num_output * (m.decode_s + m.context_s * (a.num_prompt + a.num_output / 2))
        for a in workload.arrivals
    ]
    return Means(mean(prompts), mean(streams))


Mode = str | Callable[[Request], str]


def run(workload: Workload, slo: SLO, mode: Mode, workers: int, prefill: int) -> Summary:
    pools = [Pool("mixed", workers, SPEC)]
    if prefill:
        pools = [Pool("prefill", prefill, SPEC), Pool("decode", workers - prefill, SPEC)]
    return Cluster(pools, mode=mode).run(workload, slo).summary


def above(tokens: int) -> Callable[[Request], str]:
    """Longer prompts are disaggregated."""
    return lambda request: DISAGGREGATED if len(request.prompt) > tokens else MIXED


def splits_of(workers: int) -> list[int]:
    """Prefill workers."""
    return sorted({min(workers - 1, max(1, round(part * workers))) for part in SPLITS})


def planned(before: Workload, slo: SLO, workers: int) -> int:
    """Prefill workers that serve those requests best; 0: all are mixed, unless that is clearly
    worse."""
    found = {n: run(before, slo, AUTO, workers, n).attainment for n in (0, *splits_of(workers))}
    return max(found, key=lambda n: found[n] - CLEARLY * (n > 0))


def compare(before: Workload, workload: Workload, slo: SLO, workers: int) -> dict[str, object]:
    """All ways at one point. Attainment is the part of the requests that kept both promises."""
    splits = splits_of(workers)
    mixed = run(workload, slo, MIXED, workers, 0).attainment
    split = {n: run(workload, slo, DISAGGREGATED, workers, n).attainment for n in splits}
    most, roles = max(split, key=lambda n: split[n]), planned(before, slo, workers)
    auto = {n: run(workload, slo, AUTO, workers, n) for n in {0, most, roles}}
    rules = [
        run(workload, slo, above(tokens), workers, most).attainment
        for tokens in THRESHOLDS
        if workers <= FEW
    ]
    better, chosen = max(mixed, split[most]), auto[roles]
    best = max(better, *rules, *(summary.attainment for summary in auto.values()))
    return {
        "mixed": round(mixed, 3),
        "disaggregated": round(split[most], 3),
        "best_prefill": most,
        "auto": round(chosen.attainment, 3),
        "auto_prefill": roles,
        "auto_part_split": round(chosen.part_split, 2),
        "auto_to_better": round(chosen.attainment / max(better, 1e-9), 3),
        "threshold": round(max(rules), 3) if rules else None,
        "best": round(best, 3),
        "regret": round(best - chosen.attainment, 3),
    }


def points(args: argparse.Namespace, workers: int) -> Iterator[dict[str, object]]:
    num_requests = max(args.requests, PER_WORKER * workers)
    for name in args.files:
        whole = load(args.traces / name).fitting(LONGEST)
        # recordings begin with hardly any load, and it grows: that is left out
        first, trace = (whole.part(k * num_requests, (k + 1) * num_requests) for k in (1, 2))
        for kind in args.slos:
            slo = SLOS[kind]
            most = workers * max(means_of(trace).carried(slo.itl_s))
            for part in args.loads or (LOADS if workers < MANY else LOADS_OF_MANY):
                before, workload = first.at_rate(part * most), trace.at_rate(part * most)
                where = {"workers": workers, "trace": trace.name, "slo": kind, "load": part}
                rate = round(part * most, 2)
                about = {**where, **asdict(slo), "rate": rate, "requests": num_requests}
                yield {**about, **compare(before, workload, slo, workers)}


SHOWN = {
    **{"workers": "workers", "trace": "trace", "slo": "promises", "load": "load"},
    **{"mixed": "all mixed", "disaggregated": "all disaggregated", "auto": "auto"},
    **{"auto_to_better": "auto to the better", "auto_prefill": "auto's prefill workers"},
    **{"auto_part_split": "of it disaggregated", "threshold": "threshold", "best": "best"},
}


def table(rows: list[dict[str, object]]) -> str:
    def shown(value: object) -> str:
        return "" if value is None else str(value).removesuffix(".first_half")

    return markdown(list(SHOWN.values()), [[shown(row[key]) for key in SHOWN] for row in rows])


def verdict(rows: list[dict[str, object]]) -> str:
    ratios = [float(str(row["auto_to_better"])) for row in rows]
    regrets = [float(str(row["regret"])) for row in rows]
    return (
        f"Auto is within 2 % of the better one or above at {sum(r >= 0.98 for r in ratios)} of "
        f"{len(rows)} points, and at least 15 % above at {sum(r >= 1.15 for r in ratios)}; the "
        f"worst ratio is {min(ratios):.2f}, the mean {mean(ratios):.2f}; the mean regret is "
        f"{mean(regrets):.3f} of the requests, the largest {max(regrets):.3f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Mixed, disaggregated, or the router's choice.")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the trace files")
    parser.add_argument("--files", nargs="+", default=list(FILES))
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument(
        "--requests", type=int, default=400, help=f"or {PER_WORKER} for each worker"
    )
    parser.add_argument("--loads", type=float, nargs="+", help="parts of what is carried")
    parser.add_argument("--slos", nargs="+", default=list(SLOS), choices=list(SLOS))
    args = parser.parse_args()
    everything: list[dict[str, object]] = []
    for workers in args.workers:
        rows = []
        for row in points(args, workers):
            rows.append(row)
            out.print(", ".join(f"{key} {value}" for key, value in row.items()))
        save("route", rows, workers=workers)
        everything += rows
        (RESULTS / "route.md").write_text(f"{table(everything)}\n{verdict(everything)}\n")
    out.print(verdict(everything))


if __name__ == "__main__":
    main()
