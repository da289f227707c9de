"""Every fault at every phase, on the live gateway and live engines in virtual time."""

import pytest

from bench.sim.matrix import FAULTS, PHASES, play


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_at_every_phase_ends_as_documented(fault: str) -> None:
    """Done 4, FAULTS 49-67, 75, 83: the same tokens, every page home, every worker back.
    ``python -m bench.faults --sim`` plays ten seeds of each cell."""
    for phase in PHASES:
        for seed in (0, 1):
            outcome = play(fault, phase, seed)
            assert outcome.startswith("ok"), f"{fault}, {phase}, seed {seed}: {outcome}"


def test_the_same_seed_is_the_same_run() -> None:
    cells = [("kill decode", "decoding"), ("drop", "transferring"), ("stop prefill", "queued")]
    for fault, phase in cells:
        assert play(fault, phase, 5) == play(fault, phase, 5) != play(fault, phase, 6)
