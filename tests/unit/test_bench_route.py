"""The router's own choice against both pure modes, on the twin: a short form of bench.route."""

import random

import pytest

from bench.route import SLOS, compare, means_of, planned
from bench.sim.workload import Workload, poisson, synthetic


def chats(rate: float = 1.0, num_requests: int = 150, seed: int = 3) -> Workload:
    rng = random.Random(seed)
    lengths = [(rng.randint(100, 2500), rng.randint(50, 350)) for _ in range(num_requests)]
    return synthetic("chats", lengths, poisson(rate, rng))


@pytest.mark.parametrize("kind, load", [("ITL-tight", 0.7), ("TTFT-tight", 0.7)])
def test_auto_is_as_good_as_the_better_pure_mode(kind: str, load: float) -> None:
    """Attainment may differ by three requests of 150."""
    slo, workload = SLOS[kind], chats()
    most = 4 * max(means_of(workload).carried(slo.itl_s))
    row = compare(chats(load * most, 300, seed=4), chats(load * most), slo, 4)
    better = max(float(str(row["mixed"])), float(str(row["disaggregated"])))
    assert float(str(row["auto"])) >= better - 0.02, row


def test_roles_follow_from_the_promises() -> None:
    """Tight gaps leave prompts no room beside streams; wide ones let every worker do both."""
    assert 1 <= planned(chats(20.0), SLOS["ITL-tight"], 4) <= 3
    assert planned(chats(20.0), SLOS["loose"], 4) == 0
