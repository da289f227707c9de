"""From logits to tokens, each request by its own rules.

A draw depends on the request's seed and on how many tokens it has, on nothing else: a request that
moves to another worker, or loses its neighbours, continues with the same tokens.
"""

import torch

from workers.core.output import Token
from workers.core.request import Sequence


class Sampler:
    def sample(self, logits: torch.Tensor, seqs: list[Sequence]) -> list[Token]:
        """One token per row of logits, float32 [len(seqs), vocab_size]."""
        return [Token(i) for i in logits.argmax(dim=-1).tolist()]

    def forget(self, request_id: str) -> None:
        pass
