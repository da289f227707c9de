"""From logits to tokens, each request by its own rules.

A draw depends on the request's seed, on how many tokens it has and on its probabilities, on nothing
else: a request that moves to another worker, or gets other neighbours, continues with the same
tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from workers.constraints import Constraints, is_constrained
from workers.core.output import Token
from workers.core.request import Sampling, Sequence
from workers.upload import upload

GREEDY_BELOW = 1e-5  # temperatures under this choose the most likely token, as in vLLM
MASK64 = (1 << 64) - 1


def most_likely(logits: torch.Tensor) -> list[int]:
    """The token of the largest logit of each row."""
    return logits.argmax(dim=-1).tolist()


class Sampler:
    """``argmax`` may be a faster ``most_likely``."""

    def __init__(
        self,
        constraints: Constraints | None = None,
        argmax: Callable[[torch.Tensor], list[int]] = most_likely,
    ) -> None:
        self.constraints = constraints or Constraints()
        self._argmax = argmax
        self._histories: dict[str, _History] = {}  # only of requests with penalties

    def sample(self, logits: torch.Tensor, seqs: list[Sequence]) -> list[Token]:
        """One token per row of logits, float32 [len(seqs), vocab_size]."""
        best = self._argmax(logits)
        tokens = []
        for i, seq in enumerate(seqs):
            sampling = seq.request.sampling
            chosen = best[i] if _is_plain(seq) else self._choose(logits[i], seq)
            if sampling.logprobs is None:
                tokens.append(Token(chosen))
            else:
                tokens.append(_with_logprobs(chosen, logits[i], sampling.logprobs))
        return tokens

    def forget(self, request_id: str) -> None:
        self._histories.pop(request_id, None)
        self.constraints.forget(request_id)

    def _choose(self, logits: torch.Tensor, seq: Sequence) -> int:
        sampling = seq.request.sampling
        logits = self.adjusted(logits, seq)
        if sampling.temperature < GREEDY_BELOW:
            return int(logits.argmax())
        probs = _filtered(torch.softmax(logits.double() / sampling.temperature, dim=-1), sampling)
        return draw(probs, uniform(sampling.seed, len(seq.output)))

    def adjusted(self, logits: torch.Tensor, seq: Sequence) -> torch.Tensor:
        """A copy of the logits after all that rules tokens out, bias and penalties."""
        sampling, logits = seq.request.sampling, logits.clone()
        self.constraints.apply(logits, seq)
        if sampling.logit_bias:
            ids, biases = _pairs(sampling.logit_bias, logits)
            logits[ids] += biases
        if _has_penalties(sampling):
            self._history(seq).penalize(logits, sampling)
        return logits

    def _history(self, seq: Sequence) -> "_History":
        history = self._histories.get(seq.id)
        if history is None or history.num_counted > len(seq.output):
            history = self._histories[seq.id] = _History(frozenset(seq.request.prompt))
        history.count(seq.output)
        return history


@dataclass(slots=True)
class _History:
    """Which tokens a request has seen: in its prompt, and how often in its output."""

    prompt: frozenset[int]
    output: Counter[int] = field(default_factory=Counter)
    num_counted: int = 0

    def count(self, output: list[int]) -> None:
        self.output.update(output[self.num_counted :])
        self.num_counted = len(output)

    def penalize(self, logits: torch.Tensor, sampling: Sampling) -> None:
        """In place. Repetition sees prompt and output; presence and frequency the output only."""
        if sampling.repetition_penalty != 1.0:
            (seen,) = upload([torch.tensor(list(self.prompt | self.output.keys()))], logits.device)
            values, penalty = logits[seen], sampling.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self.output and (sampling.frequency_penalty or sampling.presence_penalty):
            ids, times = _pairs(self.output.items(), logits)
            logits[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty


def uniform(seed: int, index: int) -> float:
    """The index-th number of the stream that a seed names, in [0, 1). This is splitmix64."""
    state = _mix((seed + 0x9E3779B97F4A7C15) & MASK64)
    return (_mix((state + (index + 1) * 0x9E3779B97F4A7C15) & MASK64) >> 11) * 2.0**-53


def draw(probs: torch.Tensor, u: float) -> int:
    """The token at which the running sum of probs, float64 [vocab_size], passes u.

    Summed in the order of the vocabulary: no sort whose near-ties could fall either way.
    """
    sums = probs.cumsum(dim=-1)
    chosen = int(torch.searchsorted(sums, sums[-1:] * u, right=True))
    return chosen if chosen < len(probs) else int(probs.argmax())  # u * sum was rounded up to sum


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def _pairs(
    pairs: Iterable[tuple[int, float]], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and numbers of the type of the logits, beside them."""
    ids, numbers = zip(*pairs, strict=True)
    tensors = upload([torch.tensor(ids), torch.tensor(numbers, dtype=logits.dtype)], logits.device)
    return tensors[0], tensors[1]


def _is_plain(seq: Sequence) -> bool:
    """Greedy with nothing that changes logits: the batched argmax is the answer."""
    return seq.request.sampling.temperature < GREEDY_BELOW and not changes_logits(seq)


def changes_logits(seq: Sequence) -> bool:
    """Whether the request's next token is chosen from other logits than the model's."""
    sampling = seq.request.sampling
    return bool(
        len(seq.output) < sampling.min_tokens
        or sampling.logit_bias
        or is_constrained(sampling)
        or _has_penalties(sampling)
    )


def _has_penalties(sampling: Sampling) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def _filtered(probs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Zero what min_p, top_k and top_p exclude. Tokens as likely as the last one kept are kept."""
    if sampling.min_p > 0:
        probs = _at_least(probs, sampling.min_p * probs.max())
    if 0 < sampling.top_k < len(probs):
        probs = _at_least(probs, probs.topk(sampling.top_k).values[-1])
    if sampling.top_p < 1:
        probs = _at_least(probs, _nucleus_floor(probs, sampling.top_p))
    return probs


def _at_least(probs: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return torch.where(probs >= floor, probs, 0.0)


def _nucleus_floor(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least likely member of the smallest set of tokens that holds top_p of the sum."""
    total = probs.sum()
    # Tokens below their even share of the rest cannot fill the rest: no need to sort them.
    candidates = probs[probs >= (1 - top_p) * total / len(probs)]
    largest = candidates.sort(descending=True).values
    last = int(torch.searchsorted(largest.cumsum(dim=-1), top_p * total))
    return largest[min(last, len(largest) - 1)]  # the sum may be rounded


def _with_logprobs(chosen: int, logits: torch.Tensor, num_top: int) -> Token:
    """Log-probabilities are the model's own: before temperature, bias and penalties."""
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(num_top)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Token(chosen, float(logprobs[chosen]), top)
