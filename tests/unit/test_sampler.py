"""Tokens follow the request's own rules, and nothing but them."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from tests.greedy import sequence
from workers.core.request import Sequence
from workers.sampler import Sampler, draw, uniform

VOCAB = 200


def logits(seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def sample(seq: Sequence, row: torch.Tensor) -> int:
    return Sampler().sample(row[None], [seq])[0].id


def support(num_draws: int = 400, **sampling: Any) -> set[int]:
    """Every token that these settings ever draw."""
    settings = {"temperature": 1.0, **sampling}
    seqs = [sequence(str(i), [1], seed=i, **settings) for i in range(num_draws)]
    return {sample(seq, logits()) for seq in seqs}


def test_greedy_takes_the_most_likely() -> None:
    rows = torch.stack([logits(i) for i in range(5)])
    tokens = Sampler().sample(rows, [sequence(str(i), [1]) for i in range(5)])
    assert [token.id for token in tokens] == rows.argmax(-1).tolist()


def test_frequencies_follow_the_probabilities() -> None:
    row, num_draws = logits(scale=1.0), 20000
    probs = (row / 0.7).double().softmax(-1)
    counts = Counter(draw(probs, uniform(7, i)) for i in range(num_draws))
    chi2 = sum((counts[i] - num_draws * float(p)) ** 2 / (num_draws * float(p)) for i, p in
               enumerate(probs))  # fmt: skip
    assert abs(chi2 - VOCAB) < 5 * math.sqrt(2 * VOCAB)


def test_uniform_is_spread_and_never_one() -> None:
    values = [uniform(seed, i) for seed in (0, 1, -1, 2**63 - 1) for i in range(2000)]
    assert min(values) >= 0 and max(values) < 1 and len(set(values)) == len(values)
    tenths = Counter(int(value * 10) for value in values)
    assert all(abs(count - 800) < 150 for count in tenths.values())


def test_draw_covers_the_ends() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    assert draw(probs, 0.0) == 1
    assert draw(probs, 0.5) == 3
    assert draw(probs, 1.0) in (1, 3)  # a rounded product: still a possible token


def test_top_k_top_p_and_min_p_limit_what_is_drawn() -> None:
    order = logits().argsort(descending=True).tolist()
    probs = logits().double().softmax(-1)[order]
    assert support(top_k=1) == {order[0]}
    assert support(top_k=5) <= set(order[:5])
    nucleus = int((probs.cumsum(0) < 0.6).sum()) + 1
    assert support(top_p=0.6) <= set(order[:nucleus])
    assert support(top_p=1e-9) == {order[0]}
    likely = int((probs >= 0.2 * probs[0]).sum())
    assert support(min_p=0.2) <= set(order[:likely])
    assert len(support()) > 40


def test_top_p_of_a_flat_distribution() -> None:
    row = torch.linspace(0, 0.1, 2000)
    seqs = [sequence(str(i), [1], temperature=1.0, top_p=0.5, seed=i) for i in range(300)]
    drawn = {sample(seq, row) for seq in seqs}
    assert min(drawn) >= 1000 - 30 and len(drawn) > 200


def test_a_seeded_draw_ignores_its_neighbours() -> None:
    """FAULTS 7: alone, or among three requests without a seed of their own."""
    rows = torch.stack([logits(i) for i in range(4)])
    for i in range(16):
        seeded = sequence("a", [1], temperature=0.8, seed=42)
        seeded.output = list(range(i))
        others = [sequence(str(n), [1], temperature=1.0, seed=n * 977 + i) for n in range(3)]
        alone = Sampler().sample(rows[:1], [seeded])[0]
        among = Sampler().sample(rows, [seeded, *others])[0]
        assert alone == among


def test_a_moved_request_continues_with_the_same_draws() -> None:
    rows = [logits(i) for i in range(20)]
    whole, here = sequence("a", [1], temperature=1.0, seed=3), Sampler()
    for row in rows:
        whole.output.append(here.sample(row[None], [whole])[0].id)
    moved = sequence("a", [1], temperature=1.0, seed=3)
    moved.output = whole.output[:11]
    there = Sampler()
    for row in rows[11:]:
        moved.output.append(there.sample(row[None], [moved])[0].id)
    assert moved.output == whole.output


def penalized(row: torch.Tensor, seq: Sequence) -> list[float]:
    """The reference: plain arithmetic on lists."""
    sampling, values = seq.request.sampling, row.tolist()
    for token in set(seq.request.prompt) | set(seq.output):
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in seq.output:
        values[token] -= sampling.frequency_penalty
    for token in set(seq.output):
        values[token] -= sampling.presence_penalty
    return values


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.4},
    ],
)
def test_penalties_count_the_right_tokens(settings: dict[str, float]) -> None:
    """FAULTS 9: repetition sees prompt and output once each, the others the output only."""
    prompt = [3, 4, 3, 4] * 10
    seq, sampler = sequence("a", prompt, max_tokens=60, **settings), Sampler()
    for i in range(60):
        row = logits(i % 5)
        expected = penalized(row, seq)
        token = sampler.sample(row[None], [seq])[0].id
        assert token == max(range(VOCAB), key=expected.__getitem__)
        seq.output.append(token)
    assert len(set(seq.output)) >= 5


def test_penalties_survive_a_restart_under_the_same_id() -> None:
    first = sequence("a", [1], frequency_penalty=2.0)
    first.output = [5, 5, 5]
    sampler = Sampler()
    sampler.sample(logits()[None], [first])
    again = sequence("a", [9], frequency_penalty=2.0)
    again.output = [7]
    kept, fresh = (s.sample(logits()[None], [again])[0] for s in (sampler, Sampler()))
    assert kept == fresh
    sampler.forget("a")
    sampler.forget("a")


def test_min_tokens_holds_back_the_stop_ids_only_so_long() -> None:
    best = int(logits().argmax())
    seq = sequence("a", [1], min_tokens=2, stop_ids=frozenset({best}))
    for expected in (False, False, True):
        token = sample(seq, logits())
        assert (token == best) is expected
        seq.output.append(token)


def test_logit_bias_adds_to_the_logits() -> None:
    best = int(logits().argmax())
    assert sample(sequence("a", [1], logit_bias=((best, -100.0),)), logits()) != best
    assert sample(sequence("a", [1], logit_bias=((17, 100.0),)), logits()) == 17


def test_logprobs_are_those_of_the_raw_logits() -> None:
    row, raw = logits(), logits().log_softmax(-1)
    settings = {"logit_bias": ((17, 100.0),), "temperature": 0.5, "logprobs": 3}
    token = Sampler().sample(row[None], [sequence("a", [1], **settings)])[0]
    assert token.id == 17
    assert token.logprob == pytest.approx(float(raw[17]))
    assert [i for i, _ in token.top] == raw.topk(3).indices.tolist()
    assert [value for _, value in token.top] == pytest.approx(raw.topk(3).values.tolist())
    only = Sampler().sample(row[None], [sequence("a", [1], logprobs=0)])[0]
    assert only.top == () and only.logprob is not None
    assert Sampler().sample(row[None], [sequence("a", [1])])[0].logprob is None
    assert torch.equal(row, logits())
