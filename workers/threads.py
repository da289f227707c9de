"""How many cores the step loop's thread may use."""

import torch

from workers.core.output import Token
from workers.core.plan import Chunk
from workers.engine import Executor


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
            self._is_said = True
        return self._runner.run(chunks)
