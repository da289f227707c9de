"""An executor that fails, freezes or dies at given steps. Off unless the configuration asks for it:
for tests and ``bench.faults`` only."""

import os
import signal
import time
from dataclasses import dataclass

from workers.core.output import Token
from workers.core.plan import Chunk
from workers.engine import Executor


@dataclass(frozen=True, slots=True)
class StepFaults:
    """Steps are counted from 1; 0 is never."""

    raise_at: int = 0
    freeze_at: int = 0
    freeze_s: float = 1.0
    kill_at: int = 0


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
        return self._executor.run(chunks)
