"""What the papers found comes out of the live code in virtual time."""

import random

import pytest

from bench.sim.cluster import Cluster, Pool, Result
from bench.sim.latency import Coefficients
from bench.sim.worker import WorkerSpec
from bench.sim.workload import Arrival, Workload, poisson, synthetic
from workers.core.policy import Limits
from workers.core.request import SLO

MODEL = Coefficients()
SHARED = WorkerSpec(MODEL, Limits(max_tokens=512, max_seqs=256), num_pages=6000)
PREFILL = WorkerSpec(MODEL, Limits(max_tokens=4096, max_seqs=256), num_pages=6000)
MIXED = [Pool("mixed", 4, SHARED)]
SPLIT = [Pool("prefill", 2, PREFILL), Pool("decode", 2, SHARED)]


def chats(rate: float, num_requests: int = 250) -> Workload:
    """Prompts of 200 to 3,000 tokens, answers of 50 to 300."""
    rng = random.Random(1)
    lengths = [(rng.randint(200, 3000), rng.randint(50, 300)) for _ in range(num_requests)]
    return synthetic("chats", lengths, poisson(rate, rng))


def attainment(pools: list[Pool], mode: str, rate: float, slo: SLO) -> float:
    return Cluster(pools, mode=mode).run(chats(rate), slo).summary.attainment


@pytest.mark.parametrize(
    "slo, split_wins", [(SLO(ttft_s=2.0, itl_s=0.015), True), (SLO(ttft_s=0.25, itl_s=0.1), False)]
)
def test_the_slo_pair_decides_between_mixed_and_disaggregated(slo: SLO, split_wins: bool) -> None:
    """DistServe, OSDI'24, against Sarathi-Serve, OSDI'24: four equal workers, the same load."""
    mixed = attainment(MIXED, "mixed", 20, slo)
    split = attainment(SPLIT, "disaggregated", 20, slo)
    assert (split - mixed if split_wins else mixed - split) > 0.2, (mixed, split)


def long_prompts_among_streams(policy: str) -> Result:
    """Eight streams; eight prompts of 4,000 tokens arrive while they run."""
    streams = [Arrival(0.0, 32, 400) for _ in range(8)]
    prompts = [Arrival(1.0 + 0.4 * i, 4000, 16) for i in range(8)]
    limits = Limits(512 if policy in ("chunked", "splitfuse") else 8192, 64, policy)
    spec = WorkerSpec(MODEL, limits, num_pages=6000)
    workload = Workload("interference", tuple(streams + prompts))
    return Cluster([Pool("mixed", 1, spec)]).run(workload)


@pytest.mark.parametrize("policy", ["chunked", "splitfuse"])
def test_chunks_remove_the_stalls_of_prefill_first(policy: str) -> None:
    """Sarathi-Serve, figure 1: the longest gap shrinks several times, the run takes as long."""
    stalls, even = long_prompts_among_streams("prefill-first"), long_prompts_among_streams(policy)
    assert stalls.gaps.percentile(100) > 5 * even.gaps.percentile(100)
    assert even.gaps.percentile(100) < 0.05
    assert even.summary.span_s < 1.15 * stalls.summary.span_s


def test_static_batches_make_newcomers_wait() -> None:
    """Orca, OSDI'22: iteration-level scheduling against whole batches."""
    static, chunked = long_prompts_among_streams("static"), long_prompts_among_streams("chunked")
    assert static.summary.ttft_p50_s > 3 * chunked.summary.ttft_p50_s


def test_a_bigger_pool_of_prefill_workers_buys_ttft_and_costs_itl() -> None:
    """Splitwise, ISCA'24: the ratio moves the bottleneck."""
    slo = SLO(ttft_s=0.5, itl_s=0.03)
    runs = [
        Cluster([Pool("prefill", p, PREFILL), Pool("decode", 4 - p, SHARED)], mode="disaggregated")
        .run(chats(24), slo)
        .summary
        for p in (1, 2, 3)
    ]
    assert runs[0].ttft_p50_s > runs[1].ttft_p50_s > runs[2].ttft_p50_s
    assert runs[0].itl_p50_s < runs[2].itl_p50_s
