"""FAKE: no model at all. The next token is a hash of the prompt and its position.

For the simulator and for tests of everything around a model: the tokens of a request are the same
on every worker and after every interruption, and known without running anything.
"""

import time

import xxhash

from workers.core.output import Token
from workers.core.plan import Chunk


def fake_token(prompt: tuple[int, ...], position: int, vocab_size: int) -> int:
    """The token at ``position`` of the output."""
    key = b"".join(token.to_bytes(4, "little") for token in (*prompt, position))
    return xxhash.xxh3_64_intdigest(key) % vocab_size


class FakeRunner:
    """An executor that takes ``step_s`` a step."""

    def __init__(self, vocab_size: int = 49152, step_s: float = 0.0) -> None:
        self.vocab_size, self.step_s = vocab_size, step_s

    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]:
        if self.step_s:
            time.sleep(self.step_s)
        return {
            seq.id: Token(fake_token(seq.request.prompt, len(seq.output), self.vocab_size))
            for seq, start, length in chunks
            if start + length == seq.num_tokens
        }

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""
