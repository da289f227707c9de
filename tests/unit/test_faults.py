"""The hooks that make things go wrong on purpose: off unless asked for, and read exactly."""

import pytest

from bench.sim.paged import PagedModel, answer
from kvtransfer.faults import PageFaults, read_faults
from serving.config import Config
from tests.stepper import request
from workers.core.pages import PagePool
from workers.core.plan import Chunk
from workers.core.policy import Limits
from workers.core.request import Sequence
from workers.fake import FakeRunner
from workers.faults import FaultyExecutor, FaultyScheduler, StepFaults


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


def test_sequences_preempted_on_purpose_say_the_same() -> None:
    faults = read_faults(StepFaults, "preempt_every=7")
    pool, model = PagePool(64, 16), PagedModel(64, 16)
    scheduler = FaultyScheduler(Limits(64, 8), pool, faults=faults, prefix_caching=False)
    seqs = [Sequence(request(str(i), 50 + i, 20)) for i in range(4)]
    for seq in seqs:
        scheduler.submit(seq)
    num_preempted = 0
    while len(scheduler):
        plan = scheduler.plan()
        num_preempted += len(plan.preempted)
        scheduler.commit(plan, {id: token.id for id, token in model.run(plan.chunks).items()})
    assert num_preempted >= 3 and pool.num_free == 64
    assert all(seq.output == answer(seq.request.prompt, 20) for seq in seqs)
