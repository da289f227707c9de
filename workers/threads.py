"""How many cores the step loop's thread may use, and which."""

import os

import torch

from workers.core.output import Token
from workers.core.plan import Chunk
from workers.engine import Executor
from workers.native.library import kernels


class OnOneThread:
    """An executor for the engine's thread: how many cores OpenMP uses is a property of the thread
    that calls it, so it has to be said there and not where the model was loaded."""

    def __init__(self, runner: Executor, threads: int) -> None:
        self.vocab_size = runner.vocab_size
        self.forget = runner.forget
        self._runner, self._threads, self._is_said = runner, threads, False

    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]:
        if not self._is_said:  # asking torch is of no use: it answers for the whole process
            torch.set_num_threads(self._threads)
            _take_whole_machine(self._threads)
            self._is_said = True
        return self._runner.run(chunks)


def _take_whole_machine(threads: int) -> None:
    """With a thread for each core there is, each gets one of its own. A worker that shares the
    machine leaves the choice to the system."""
    native = kernels()
    if native is None or threads < 2 or not hasattr(os, "sched_getaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == threads:
        native.pin_team(cores)
