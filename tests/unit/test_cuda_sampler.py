"""The device's sampler chooses what the host's does, and makes the host wait once."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.greedy import sequence
from workers.core.request import Sequence
from workers.cuda.sampler import DeviceSampler
from workers.sampler import Sampler

VOCAB = 300

rules = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 40, 299, 300, 1000]),
        "top_p": st.sampled_from([1.0, 0.999999, 0.9, 0.5, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logprobs": st.sampled_from([None, None, 0, 1, 5]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "logit_bias": st.sampled_from([(), (), ((3, 5.0), (7, -100.0))]),
        "allowed_ids": st.sampled_from([frozenset(), frozenset(range(5, 200))]),
        "bad_words": st.sampled_from([(), ((10,), (2, 3, 11))]),
        "min_tokens": st.sampled_from([0, 9]),
        "stop_ids": st.sampled_from([frozenset(), frozenset({1, 2})]),
    }
)


def batch(requests: list[dict[str, Any]], seed: int) -> tuple[torch.Tensor, list[Sequence]]:
    generator = torch.Generator().manual_seed(seed)
    seqs = [sequence(str(i), [1, 2, 3, i], **request) for i, request in enumerate(requests)]
    for i, seq in enumerate(seqs):
        seq.output = list(range(i % 5))
    logits = torch.randn(len(seqs), VOCAB, generator=generator) * 3
    logits[:, 10:14] = logits[:, 10:11]  # ties
    return logits, seqs


@given(st.lists(rules, min_size=1, max_size=8), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_the_same_tokens_and_logprobs_as_on_the_host(
    requests: list[dict[str, Any]], seed: int
) -> None:
    logits, seqs = batch(requests, seed)
    expected = Sampler().sample(logits.clone(), seqs)
    tokens = DeviceSampler().sample(logits, seqs)
    assert [token.id for token in tokens] == [token.id for token in expected]
    for ours, theirs in zip(tokens, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [value for _, value in ours.top] == pytest.approx(
            [value for _, value in theirs.top], abs=1e-5
        )


def test_more_rows_than_are_drawn_at_once() -> None:
    requests = [{"temperature": 1.0, "top_p": 0.9, "seed": i} for i in range(150)]
    logits, seqs = batch(requests, 3)
    tokens = DeviceSampler().sample(logits, seqs)
    assert tokens == Sampler().sample(logits, seqs)


def test_the_logits_are_left_as_they_were() -> None:
    """They may be the output of a recorded graph."""
    logits, seqs = batch([{"temperature": 1.0, "repetition_penalty": 1.5}] * 3, 4)
    before = logits.clone()
    DeviceSampler().sample(logits, seqs)
    assert torch.equal(before, logits)


class Waits(torch.overrides.TorchFunctionMode):
    """Counts what would make the host wait for a device."""

    NAMES = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "nonzero", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once() -> None:
    """Whatever the requests ask for: greedy, drawn, penalized, with log-probabilities."""
    requests = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 3},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {
            "temperature": 0.0,
            "logit_bias": ((3, 5.0),),
            "min_tokens": 9,
            "stop_ids": frozenset({1}),
        },
    ]
    logits, seqs = batch(requests, 5)
    with Waits() as waits:
        DeviceSampler().sample(logits, seqs)
    assert waits.names == ["tolist"]
