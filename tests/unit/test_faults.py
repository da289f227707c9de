"""The hooks that make things go wrong on purpose: off unless asked for, and read exactly."""

import pytest

from kvtransfer.faults import PageFaults, read_faults
from serving.config import Config
from tests.stepper import request
from workers.core.plan import Chunk
from workers.core.request import Sequence
from workers.fake import FakeRunner
from workers.faults import FaultyExecutor, StepFaults


def test_faults_are_read_from_the_configuration_and_off_by_default() -> None:
    assert Config().page_faults == Config().step_faults == ""
    faults = read_faults(PageFaults, "drop=0.05 seed=7 delay_s=1")
    assert faults == PageFaults(drop=0.05, seed=7, delay_s=1.0)
    with pytest.raises(ValueError, match="'lose' is not one of drop, delay"):
        read_faults(PageFaults, "lose=1")


def test_a_step_raises_once_and_the_next_one_runs() -> None:
    executor = FaultyExecutor(FakeRunner(), read_faults(StepFaults, "raise_at=2"))
    chunk = Chunk(Sequence(request("r", 4)), 0, 4)
    assert executor.run((chunk,))
    with pytest.raises(RuntimeError, match="on purpose"):
        executor.run((chunk,))
    assert executor.run((chunk,))
