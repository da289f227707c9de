"""Sampling on the device: the rules of workers.sampler for all rows at once.

The host waits once, for the chosen tokens and the log-probabilities that were asked for.
"""

from dataclasses import dataclass

import torch

from workers.core.output import Token
from workers.core.request import Sequence
from workers.sampler import GREEDY_BELOW, Sampler, changes_logits, uniform
from workers.upload import upload

ROWS_AT_ONCE = 64  # probabilities are float64 and sorted: 10 to 80 MB each for so many rows


class DeviceSampler(Sampler):
    def sample(self, logits: torch.Tensor, seqs: list[Sequence]) -> list[Token]:
        """One token per row of logits, float32 [len(seqs), vocab_size]."""
        adjusted = self._all_adjusted(logits, seqs)
        chosen = adjusted.argmax(dim=-1)
        drawn = [i for i, seq in enumerate(seqs) if _temperature(seq) >= GREEDY_BELOW]
        for start in range(0, len(drawn), ROWS_AT_ONCE):
            part = drawn[start : start + ROWS_AT_ONCE]
            rules = _Rules.of([seqs[i] for i in part], part, logits.device)
            chosen[rules.rows] = _draw(adjusted[rules.rows], rules)
        return _download(chosen, logits, seqs)

    def _all_adjusted(self, logits: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
        changed = [i for i, seq in enumerate(seqs) if changes_logits(seq)]
        if not changed:
            return logits
        adjusted = logits.clone()
        for i in changed:
            adjusted[i] = self.adjusted(logits[i], seqs[i])
        return adjusted


@dataclass(frozen=True, slots=True)
class _Rules:
    """How some rows are drawn. All but the last are tensors [num_rows] on the device."""

    rows: torch.Tensor  # int64
    temperatures: torch.Tensor  # float64, as all below but top_k
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor  # int64; 0: all
    uniforms: torch.Tensor  # in [0, 1)
    need_order: bool  # whether any row has a top_k or top_p

    @classmethod
    def of(cls, seqs: list[Sequence], rows: list[int], device: torch.device) -> "_Rules":
        rules = [seq.request.sampling for seq in seqs]
        uniforms = [uniform(seq.request.sampling.seed, len(seq.output)) for seq in seqs]
        ids, temperatures, min_p, top_p, top_k, numbers = upload(
            [
                torch.tensor(rows, dtype=torch.int64),
                torch.tensor([rule.temperature for rule in rules], dtype=torch.float64),
                torch.tensor([rule.min_p for rule in rules], dtype=torch.float64),
                torch.tensor([rule.top_p for rule in rules], dtype=torch.float64),
                torch.tensor([rule.top_k for rule in rules], dtype=torch.int64),
                torch.tensor(uniforms, dtype=torch.float64),
            ],
            device,
        )
        need_order = any(rule.top_k > 0 or rule.top_p < 1 for rule in rules)
        return cls(ids, temperatures, min_p, top_p, top_k, numbers, need_order)


def _draw(logits: torch.Tensor, rules: _Rules) -> torch.Tensor:
    """int64 [num_rows]: where the running sum of a row's probabilities passes its number."""
    probs = torch.softmax(logits.double() / rules.temperatures[:, None], dim=-1)
    probs = _at_least(probs, rules.min_p * probs.amax(dim=-1))
    if rules.need_order:
        probs = _filtered(probs, rules)
    sums = probs.cumsum(dim=-1)
    marks = sums[:, -1:] * rules.uniforms[:, None]
    chosen = torch.searchsorted(sums, marks, right=True).squeeze(1)
    return torch.where(chosen < probs.shape[1], chosen, probs.argmax(dim=-1))


def _filtered(probs: torch.Tensor, rules: _Rules) -> torch.Tensor:
    """Zero what top_k and then top_p exclude. Tokens as likely as the last one kept are kept."""
    vocab_size = probs.shape[1]
    largest = probs.sort(dim=-1, descending=True).values
    last = torch.where(rules.top_k > 0, rules.top_k, vocab_size).clamp(max=vocab_size) - 1
    floor = largest.gather(1, last[:, None]).squeeze(1)
    probs, largest = _at_least(probs, floor), _at_least(largest, floor)
    total = probs.sum(dim=-1)
    # As on the host: of the tokens below their even share of the rest none is the last one kept.
    candidates = (largest >= ((1 - rules.top_p) * total / vocab_size)[:, None]).sum(dim=-1)
    marks = (rules.top_p * total)[:, None]
    last = torch.searchsorted(largest.cumsum(dim=-1), marks).squeeze(1)
    floor = largest.gather(1, last.minimum(candidates - 1)[:, None]).squeeze(1)
    return _at_least(probs, torch.where(rules.top_p < 1, floor, 0.0))


def _at_least(probs: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return torch.where(probs >= floor[:, None], probs, 0.0)


def _download(chosen: torch.Tensor, logits: torch.Tensor, seqs: list[Sequence]) -> list[Token]:
    """Tokens, with the model's own log-probabilities where they are wanted, in one copy."""
    wanted = [i for i, seq in enumerate(seqs) if seq.request.sampling.logprobs is not None]
    if not wanted:
        return [Token(token) for token in chosen.tolist()]
    num_top = max(seqs[i].request.sampling.logprobs or 0 for i in wanted)
    (rows,) = upload([torch.tensor(wanted, dtype=torch.int64)], logits.device)
    logprobs = torch.log_softmax(logits[rows], dim=-1)
    own = logprobs.gather(1, chosen[rows][:, None])
    values, ids = logprobs.topk(num_top)
    table = torch.cat((own.double(), ids.double(), values.double()), dim=1)  # ids are exact in it
    flat = torch.cat((chosen.double(), table.flatten())).tolist()
    tokens = [Token(int(token)) for token in flat[: len(seqs)]]
    width = 1 + 2 * num_top
    for at, i in enumerate(wanted):
        row = flat[len(seqs) + at * width :][:width]
        count = seqs[i].request.sampling.logprobs or 0
        ids_of, values_of = row[1 : 1 + count], row[1 + num_top :][:count]
        top = tuple(zip(map(int, ids_of), values_of, strict=True))
        tokens[i] = Token(tokens[i].id, row[0], top)
    return tokens


def _temperature(seq: Sequence) -> float:
    return seq.request.sampling.temperature
