"""What the model thought of each token of a prompt, for requests that ask: collected chunk by chunk
and given with the first token.

The scheduler finds no cached pages for such a request, so every row of its prompt is computed here.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from workers.core.output import PromptToken, Token
from workers.core.plan import Chunk
from workers.core.request import Sequence
from workers.upload import upload

ROWS_AT_ONCE = 64  # logits are a vocabulary wide


def asks_about_prompts(chunks: tuple[Chunk, ...]) -> bool:
    """Whether the hidden states of all rows are needed, and not only of those that sample."""
    return any(chunk.seq.wants_prompt for chunk in chunks)


class PromptLogprobs:
    """Of the requests on one worker. All calls come from the engine's thread."""

    def __init__(self) -> None:
        self._found: dict[str, list[PromptToken]] = {}  # entry i: of the prompt's token i + 1

    def note(
        self,
        chunks: tuple[Chunk, ...],
        hidden: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """``hidden`` [num_tokens, hidden_size] has the rows of the chunks, in their order."""
        row = 0
        for chunk in chunks:
            if chunk.seq.wants_prompt:
                self._add(chunk, hidden[row : row + chunk.length], logits)
            row += chunk.length

    def attach(self, seqs: list[Sequence], tokens: list[Token]) -> list[Token]:
        """To first tokens."""
        if not self._found:
            return tokens
        return [
            replace(token, prompt=tuple(self._found.pop(seq.id)))
            if seq.wants_prompt and seq.id in self._found
            else token
            for seq, token in zip(seqs, tokens, strict=True)
        ]

    def forget(self, request_id: str) -> None:
        self._found.pop(request_id, None)

    def _add(
        self, chunk: Chunk, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        seq, start = chunk.seq, chunk.start
        found = self._found.setdefault(seq.id, [])
        del found[start:]  # of a run that was preempted
        targets = seq.request.prompt[start + 1 : start + chunk.length + 1]
        num_top = seq.request.sampling.prompt_logprobs or 0
        for at in range(0, len(targets), ROWS_AT_ONCE):
            part = targets[at : at + ROWS_AT_ONCE]
            found += _read(logits(hidden[at : at + len(part)]), part, num_top)


def _read(logits: torch.Tensor, targets: tuple[int, ...], num_top: int) -> list[PromptToken]:
    """Each row of logits against the token that follows it."""
    (ids,) = upload([torch.tensor(targets, dtype=torch.int64)], logits.device)
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, top = logprobs.topk(num_top)
    rows = zip(own.squeeze(1).tolist(), ranks.tolist(), top.tolist(), values.tolist(), strict=True)
    return [
        PromptToken(logprob, rank, tuple(zip(ids_of, values_of, strict=True)))
        for logprob, rank, ids_of, values_of in rows
    ]
