"""The twin beside others: what is compared is what it says, and a rule published elsewhere."""

from dataclasses import asdict

import pytest

from bench.report import Record
from bench.sim.cluster import Pool
from bench.sim.fidelity import LONE, Overhead, compare, overhead_of, simulate, spec_of
from bench.sim.validate import distserve_run, distserve_workload, their_ttfts
from bench.workloads import poisson_mix
from workers.core.pace import Pace

PACE = Pace(coefficients=(0.005, 2e-4, 1e-8, 5e-4, 1e-7, 0.0), token_bytes=1024, is_measured=True)
VIEW = {"pace": asdict(PACE), "page_size": 16, "num_pages": 4000, "max_model_len": 8192}


def as_seen(twin: object, front_s: float) -> list[Record]:
    """Clients that see exactly what the twin says, with even gaps."""
    records = []
    for outcome in twin.outcomes:  # type: ignore[attr-defined]
        first = outcome.first_at + front_s
        times = [first + i * outcome.tpot_s for i in range(outcome.num_output)]
        records.append(Record("r", outcome.arrived_at, times))
    return records


@pytest.mark.parametrize("layout", ["mixed", "disaggregated"])
def test_a_machine_that_does_as_the_twin_says_is_found_to_be_so(layout: str) -> None:
    roles = ("mixed",) if layout == "mixed" else ("prefill", "decode")
    pools, asks = [Pool(role, 1, spec_of(VIEW)) for role in roles], poisson_mix(1.0, 20.0, 3)
    real = Overhead(0.002, 0.01)
    lone = as_seen(simulate(pools, [LONE], layout, real), real.front_s)[0]
    found = overhead_of(lone, pools, layout)
    assert found.step_s == pytest.approx(real.step_s, abs=5e-4)
    twin = simulate(pools, asks, layout, found)
    for cell in compare(layout, "50%", as_seen(twin, found.front_s), twin, found):
        if "ITL" not in cell.figure:
            assert abs(cell.off) < 1e-6, cell
    slower = simulate(pools, asks, layout, Overhead(0.02, found.front_s))
    off = {c.figure: c.off for c in compare(layout, "50%", as_seen(twin, 0.01), slower, found)}
    assert off["end to end p50"] > 0.5


def test_the_twin_prefills_by_distserves_rule_to_the_microsecond() -> None:
    theirs = their_ttfts(distserve_workload(5.0, 0).arrivals)
    ours = [outcome.ttft_s for outcome in distserve_run(5.0, 0)]
    assert ours == pytest.approx(theirs, abs=1e-6)
