"""The twin: live scheduler, router and ledgers in virtual time, with faults far above natural."""

import random

import pytest

from bench.sim.cluster import Cluster, Pool, Result
from bench.sim.faults import NO_FAULTS, Faults
from bench.sim.latency import Coefficients, Link
from bench.sim.streams import Call
from bench.sim.worker import WorkerSpec, fake_token
from bench.sim.workload import Arrival, Workload
from workers.core.policy import POLICIES, Limits

TERRIBLE = Faults(
    mean_life_s=3.0,
    restart_s=0.4,
    detect_s=0.2,
    transfer_fails=0.2,
    transfer_stalls=0.1,
    max_delay_s=0.05,
    aborts=0.15,
    max_patience_s=3.0,
)
LAYOUTS = {
    "mixed": (("mixed", 3),),
    "split": (("prefill", 2), ("decode", 2)),
    "both": (("mixed", 1), ("prefill", 1), ("decode", 1)),
}


def random_workload(rng: random.Random, num_requests: int) -> Workload:
    """Short and long prompts, a third of them with prefixes that others have."""
    arrivals, now = [], 0.0
    for i in range(num_requests):
        now += rng.expovariate(rng.choice((5, 40)))
        num_prompt = rng.choice((rng.randint(1, 60), rng.randint(100, 600)))
        blocks = tuple(
            rng.randint(1, 3) if rng.random() < 0.4 else 1000 * i + b
            for b in range(-(-num_prompt // 64))
        )
        arrivals.append(Arrival(now, num_prompt, rng.randint(1, 60), blocks))
    return Workload("random", tuple(arrivals), block_size=64)


def random_cluster(
    seed: int, faults: Faults, calls: list[Call], skips: bool | None = None
) -> tuple[Cluster, Workload]:
    rng = random.Random(seed)
    spec = WorkerSpec(
        Coefficients(link=Link(2e-3, rng.choice((1e8, 1e10)))),
        Limits(rng.choice((16, 64, 512)), rng.choice((4, 64)), rng.choice(list(POLICIES))),
        num_pages=rng.choice((48, 96, 1000)),
        prefix_caching=rng.random() < 0.7,
        lease_s=rng.choice((0.2, 5.0)),
        transfer_timeout_s=0.5,
    )
    roles = LAYOUTS[rng.choice(list(LAYOUTS))]
    pools = [Pool(role, number, spec) for role, number in roles]
    cluster = Cluster(
        pools,
        faults=faults,
        seed=seed,
        max_queue=rng.choice((2, 256)),
        mode=rng.choice(("auto", "auto", "mixed", "disaggregated")),
        on_end=calls.append,
        skips=skips,
    )
    return cluster, random_workload(rng, 40)


def run_random(seed: int, faults: Faults) -> tuple[Cluster, Workload, list[Call], Result]:
    calls: list[Call] = []
    cluster, workload = random_cluster(seed, faults, calls)
    return cluster, workload, calls, cluster.run(workload)


def check(cluster: Cluster, workload: Workload, calls: list[Call], result: Result) -> None:
    """Every request ended once, with the tokens that FAKE says; nothing is held anywhere."""
    assert sorted(int(call.request.id) for call in calls) == list(range(len(workload.arrivals)))
    assert all(outcome.reason for outcome in result.outcomes)
    for call in calls:
        seed = call.request.sampling.seed
        assert call.output == [fake_token(seed, i) for i in range(len(call.output))]
        if call.outcome.is_finished:
            fits = cluster.workers and min(w.pool.max_tokens for w in cluster.workers.values())
            wanted = min(call.request.sampling.max_tokens, fits - len(call.request.prompt) + 1)
            assert len(call.output) == wanted
    for worker in cluster.workers.values():
        assert worker.is_clean, worker.id


@pytest.mark.parametrize("seeds", range(0, 120, 20))
def test_every_request_ends_with_its_tokens_whatever_breaks(seeds: int) -> None:
    """FAULTS 43, 55, 57, 65, 67: deaths, failed transfers, late messages, impatient clients."""
    ends: dict[str, int] = {}
    for seed in range(seeds, seeds + 20):
        cluster, workload, calls, result = run_random(seed, TERRIBLE)
        check(cluster, workload, calls, result)
        for outcome in result.outcomes:
            kind = outcome.reason.split(":")[0]
            ends[kind] = ends.get(kind, 0) + 1
    assert ends["length"] > 100 and ends["aborted"] > 10, ends


@pytest.mark.parametrize("seeds", range(1000, 1100, 20))
def test_without_faults_every_request_that_fits_is_answered(seeds: int) -> None:
    for seed in range(seeds, seeds + 20):
        cluster, workload, calls, result = run_random(seed, NO_FAULTS)
        check(cluster, workload, calls, result)
        kinds = {outcome.reason.split(":")[0] for outcome in result.outcomes}
        assert kinds <= {"length", "refused", "no route"}, kinds
        assert result.summary.num_replays == 0


def test_the_same_seed_gives_the_same_bytes() -> None:
    first, second, other = (run_random(seed, TERRIBLE)[3].to_json() for seed in (7, 7, 8))
    assert first == second != other


def test_steps_that_are_skipped_change_no_byte() -> None:
    """Quiet steps are computed ahead, and caught up with by whoever looks or comes."""
    num_events = {True: 0, False: 0}
    for seed in range(25):
        results = {}
        for skips in (True, False):
            cluster, workload = random_cluster(seed, NO_FAULTS, [], skips)
            results[skips] = cluster.run(workload)
            num_events[skips] += results[skips].num_events
        assert results[True].to_json() == results[False].to_json(), seed
    assert num_events[True] < 0.8 * num_events[False]


def test_what_would_come_too_late_is_refused_as_live() -> None:
    """Ten times what a worker can do: those that are let in are served in time."""
    arrivals = tuple(Arrival(i / 100, 1000, 20, ()) for i in range(400))
    spec = WorkerSpec(Coefficients(), Limits(512, 64), num_pages=4000)
    for limit in (256, 1 << 20):
        cluster = Cluster([Pool("mixed", 1, spec)], max_queue=limit)
        summary = cluster.run(Workload("flood", arrivals)).summary
        assert (summary.num_refused > 200) == (limit == 256)
        assert (summary.ttft_p99_s < 4.0) == (limit == 256)


def test_a_lone_request_takes_what_its_steps_take() -> None:
    model = Coefficients()
    spec = WorkerSpec(model, Limits(max_tokens=512))
    workload = Workload("one", (Arrival(1.0, 500, 3),))
    result = Cluster([Pool("mixed", 1, spec)]).run(workload)
    outcome = result.outcomes[0]
    prefill = model.fixed_s + 500 * model.prefill_token_s + 500 * 500 * model.attention_s
    decodes = 2 * (model.fixed_s + model.decode_s) + (500 + 501) * model.context_s
    assert outcome.ttft_s == pytest.approx(prefill)
    assert outcome.e2e_s == pytest.approx(prefill + decodes)


def test_a_transfer_costs_its_bytes_once() -> None:
    link = Link(fixed_s=0.25, bytes_per_s=1e9)
    spec = WorkerSpec(Coefficients(link=link), Limits(max_tokens=512))
    workload = Workload("one", (Arrival(0.0, 512, 3),))
    pools = [Pool("prefill", 1, spec), Pool("decode", 1, spec)]
    outcome = Cluster(pools, mode="disaggregated").run(workload).outcomes[0]
    moved = 0.25 + 32 * spec.layout.page_bytes / 1e9
    assert outcome.mode == "disaggregated"
    assert outcome.e2e_s - outcome.ttft_s == pytest.approx(moved + 2 * 9.05e-3, rel=1e-3)


def test_a_known_prefix_is_computed_once() -> None:
    spec = WorkerSpec(Coefficients(), Limits(max_tokens=4096))
    arrivals = tuple(Arrival(float(i), 1024, 2, (1, 10 + i)) for i in range(4))
    result = Cluster([Pool("mixed", 1, spec)]).run(Workload("shared", arrivals))
    assert result.summary.cached_part == pytest.approx(3 * 512 / 4096)
    assert result.outcomes[1].ttft_s < result.outcomes[0].ttft_s


def test_two_workers_that_wait_for_each_others_pages_do_not_wait_for_ever() -> None:
    """FAULTS 39: each leases to the other all that the other needs to make room for it."""
    spec = WorkerSpec(Coefficients(), Limits(max_tokens=512), num_pages=26, lease_s=0.5)
    arrivals = tuple(Arrival(0.0, 256, 40) for i in range(8))
    cluster = Cluster([Pool("mixed", 2, spec)], mode="disaggregated")
    result = cluster.run(Workload("crossing", arrivals))
    assert [outcome.reason for outcome in result.outcomes] == ["length"] * 8
    assert result.summary.num_fallbacks > 0, "they met in the situation"
    assert all(worker.is_clean for worker in cluster.workers.values())
