"""Who wins where: every request mixed, every request disaggregated, or the router's choice each.

    python -m bench.route --traces ../shared/traces [--workers 4 8 32] [--requests 400]

The live router, schedulers and step budgets in virtual time, at several parts of what the cluster
could carry, for promises of several kinds. Disaggregated is given the best of several fixed splits
into prefill and decode workers at each point, found with hindsight. Auto gets one set of roles for
each trace and pair of promises, from their mean lengths alone (``prefill_workers``; live, the
autoscaler sets roles), and then chooses for each request. ``oracle`` is the best of everything
tried at a point, auto with other roles included. Writes ``bench/results/route.jsonl``.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from bench.report import save
from bench.sim.cluster import Cluster, Pool
from bench.sim.latency import Coefficients
from bench.sim.outcome import Summary
from bench.sim.worker import LLAMA_8B, WorkerSpec
from bench.sim.workload import Workload, load
from serving.console import out
from serving.core.predict import FORGIVEN
from workers.core.budget import CEILING_S
from workers.core.policy import Limits
from workers.core.request import SLO

MODEL = Coefficients()
MAX_TOKENS = 2048
LAYOUT = replace(LLAMA_8B, page_size=64)
SPEC = WorkerSpec(
    MODEL,
    Limits(max_tokens=MAX_TOKENS, max_seqs=256, online=True),
    num_pages=6000,
    layout=LAYOUT,
)
LONGEST = 60_000  # tokens of a request; longer ones are left out
SPLITS = (0.25, 0.5, 0.75)
LOADS = (0.5, 0.7, 0.85, 1.0, 1.2)
CLEARLY = 1.1  # times what mixed workers carry: then there are roles
TOKEN_BYTES = LAYOUT.page_bytes / LAYOUT.page_size
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
    prompt_tokens: float
    brief: float  # part of them whose answer is too short to be forgiven a late gap

    def carried(self, itl_s: float) -> tuple[float, float]:
        """Requests a second and worker, all mixed and all disaggregated, if none ever waits and
        every step lasts as long as the promise allows."""
        useful = 1 - MODEL.fixed_s / min(itl_s, CEILING_S)
        alone = 1 - MODEL.fixed_s / (MODEL.fixed_s + MAX_TOKENS * MODEL.prefill_token_s)
        mixed = useful / (self.prompt_s + self.stream_s)
        return mixed, 1 / (self.prompt_s / alone + self.stream_s / useful)

    def prefill_workers(self, itl_s: float, workers: int) -> int:
        """How many of them had better only prefill; 0 when mixed workers carry about as much."""
        mixed, split = self.carried(itl_s)
        gap_s = MODEL.transfer_s(int(self.prompt_tokens * TOKEN_BYTES)) + 1.5 * MODEL.fixed_s
        kept = 1.0 - self.brief * (gap_s > 0.5 * itl_s)  # at a hand-off
        if split * kept < CLEARLY * mixed:
            return 0
        alone = 1 - MODEL.fixed_s / (MODEL.fixed_s + MAX_TOKENS * MODEL.prefill_token_s)
        return min(workers - 1, max(1, round(workers * split * self.prompt_s / alone)))


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
    return Means(
        mean(prompts),
        mean(streams),
        mean(a.num_prompt for a in workload.arrivals),
        mean(a.num_output <= FORGIVEN for a in workload.arrivals),
    )


def run(workload: Workload, slo: SLO, mode: str, workers: int, prefill: int) -> Summary:
    pools = [Pool("mixed", workers, SPEC)]
    if prefill:
        pools = [Pool("prefill", prefill, SPEC), Pool("decode", workers - prefill, SPEC)]
    return Cluster(pools, mode=mode).run(workload, slo).summary


def compare(workload: Workload, slo: SLO, workers: int) -> dict[str, object]:
    """All ways at one point. Goodput counts requests that kept both promises, per second of
    arrivals."""
    splits = sorted({min(workers - 1, max(1, round(part * workers))) for part in SPLITS})
    roles = means_of(workload).prefill_workers(slo.itl_s, workers)
    mixed = run(workload, slo, "mixed", workers, 0)
    split = {n: run(workload, slo, "disaggregated", workers, n) for n in splits}
    best = max(splits, key=lambda n: split[n].attainment)
    auto = {n: run(workload, slo, "auto", workers, n) for n in {0, roles, best}}
    chosen = auto[roles]
    better = max(mixed.attainment, split[best].attainment)
    oracle = max(better, *(summary.attainment for summary in auto.values()))
    return {
        "mixed": round(mixed.attainment, 3),
        "disaggregated": round(split[best].attainment, 3),
        "best_prefill": best,
        "auto": round(chosen.attainment, 3),
        "auto_prefill": roles,
        "auto_part_split": round(chosen.part_split, 2),
        "auto_to_better": round(chosen.attainment / max(better, 1e-9), 3),
        "regret": round(oracle - chosen.attainment, 3),
    }


def points(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for workers in args.workers:
        for name in args.files:
            num_requests = args.requests * max(1, workers // 8)
            trace = load(args.traces / name).fitting(LONGEST).first(num_requests)
            for kind in args.slos:
                slo = SLOS[kind]
                most = workers * max(means_of(trace).carried(slo.itl_s))
                for part in args.loads:
                    workload = trace.at_rate(part * most)
                    where = {"workers": workers, "trace": trace.name, "slo": kind, "load": part}
                    yield {
                        **where,
                        **asdict(slo),
                        "rate": round(part * most, 2),
                        **compare(workload, slo, workers),
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Mixed, disaggregated, or the router's choice.")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the trace files")
    parser.add_argument("--files", nargs="+", default=list(FILES))
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--requests", type=int, default=400, help="for up to 8 workers")
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--slos", nargs="+", default=list(SLOS), choices=list(SLOS))
    args = parser.parse_args()
    rows = []
    for row in points(args):
        rows.append(row)
        out.print(", ".join(f"{key} {value}" for key, value in row.items()))
    ratios = [float(str(row["auto_to_better"])) for row in rows]
    out.print(
        f"auto within 2 % of the better one at {sum(r >= 0.98 for r in ratios)} of {len(rows)} "
        f"points, at least 15 % above at {sum(r >= 1.15 for r in ratios)}; worst {min(ratios):.2f}"
    )
    save("route", rows)


if __name__ == "__main__":
    main()
