"""Steps that fail, freeze, drag or die, and sequences that lose their pages, at given steps. Off
unless the configuration asks for it: for tests and ``bench.faults`` only."""

import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

from workers.core.output import Token
from workers.core.plan import Chunk, StepPlan
from workers.core.scheduler import Scheduler
from workers.engine import Executor


@dataclass(frozen=True, slots=True)
class StepFaults:
    """Steps are counted from 1; 0 is never."""

    raise_at: int = 0
    freeze_at: int = 0
    freeze_s: float = 1.0
    kill_at: int = 0
    slow_s: float = 0.0  # longer than it takes, each of them
    preempt_every: int = 0  # the least important sequence, before each so-many-eth step


class FaultyExecutor:
    def __init__(self, executor: Executor, faults: StepFaults) -> None:
        self.vocab_size = executor.vocab_size
        self.forget = executor.forget
        self._executor, self._faults, self._step = executor, faults, 0

    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]:
        self._step += 1
        if self._step == self._faults.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._step == self._faults.freeze_at:
            time.sleep(self._faults.freeze_s)
        if self._step == self._faults.raise_at:
            raise RuntimeError("raised on purpose")
        if self._faults.slow_s:
            time.sleep(self._faults.slow_s)
        return self._executor.run(chunks)


class FaultyScheduler(Scheduler):
    def __init__(self, *args: Any, faults: StepFaults, **options: Any) -> None:
        super().__init__(*args, **options)
        self._every, self._step = faults.preempt_every, 0

    def plan(self, now: float = 0.0) -> StepPlan:
        self._step += 1
        if self._step % self._every or not self._num_running:
            return super().plan(now)
        victim = self._least_important()
        self._preempt(victim)
        plan = super().plan(now)
        return replace(plan, preempted=(victim, *plan.preempted))
