"""What the model thought of the prompt: the same in whatever chunks, cached or not (FAULTS 5)."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import FakePools
from tests.front import TOKENIZER, chunks, front, says
from tests.greedy import Reference, sequence
from tests.pair import Pair
from workers.core.output import PromptToken
from workers.core.plan import Chunk
from workers.core.policy import Limits
from workers.core.request import Request, Sampling
from workers.models.config import ModelConfig
from workers.models.llama import Llama
from workers.runner import ModelRunner
from workers.weights import Checkpoint

PROMPT = tuple(random.Random(7).choices(range(49152), k=150))


def run(runner: ModelRunner, name: str, lengths: list[int]) -> tuple[PromptToken, ...]:
    """The prompt in chunks of these lengths, beside a neighbour that asks for nothing."""
    seq = sequence(name, PROMPT, range(10), prompt_logprobs=3)
    for length in lengths:
        neighbour = sequence("n", PROMPT[:20], range(10, 12))
        chunk = Chunk(seq, seq.num_computed, length)
        tokens = runner.run((Chunk(neighbour, 0, 20), chunk))
        seq.num_computed += length
    assert not tokens["n"].prompt
    return tokens[name].prompt


@pytest.mark.parametrize("lengths", [[150], [64, 64, 22], [1, 99, 49, 1], [150 - 17, 17]])
def test_every_chunking_gives_the_models_own_logprobs(
    t0: ModelRunner, t0_folder: Path, lengths: list[int]
) -> None:
    found = run(t0, str(lengths), lengths)
    logprobs = torch.log_softmax(Reference(t0_folder).logits(PROMPT), dim=-1)
    assert len(found) == len(PROMPT) - 1
    for row, (token_id, entry) in enumerate(zip(PROMPT[1:], found, strict=True)):
        expected = logprobs[row]
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=2e-3)
        assert [i for i, _ in entry.top] == expected.topk(3).indices.tolist()
        assert abs(entry.rank - 1 - int((expected > expected[token_id]).sum())) <= 3


def test_a_prompt_computed_again_is_told_once(t0: ModelRunner) -> None:
    """After a preemption the first chunks come a second time."""
    first = sequence("again", PROMPT, range(10), prompt_logprobs=1)
    t0.run((Chunk(first, 0, 100),))
    second = sequence("again", PROMPT, range(10), prompt_logprobs=1)
    t0.run((Chunk(second, 0, 60),))
    second.num_computed = 60
    assert len(t0.run((Chunk(second, 60, 90),))["again"].prompt) == len(PROMPT) - 1
    t0.forget("again")


@pytest.mark.parametrize("disaggregated", [False, True])
def test_a_cached_prompt_tells_as_much_as_a_new_one(t0_folder: Path, disaggregated: bool) -> None:
    """FAULTS 5: the pages are there, the logits are not, so they are computed again."""
    config = ModelConfig.load(t0_folder)
    model = Llama(config, Checkpoint(t0_folder), torch.float32, torch.device("cpu"))
    sampling = Sampling(max_tokens=4, temperature=0.0, prompt_logprobs=2)
    with Pair(model, Limits(max_tokens=64)) as pair:
        told = []
        for name in ("a", "b"):
            plain = Request(f"{name}-plain", PROMPT, Sampling(max_tokens=4, temperature=0.0))
            pair.generate([plain], disaggregated=disaggregated)
            asked = Request(name, PROMPT, sampling)
            pair.generate([asked], disaggregated=disaggregated)
            told.append(pair.first_tokens[name].prompt)
    assert told[0] == told[1] and len(told[0]) == len(PROMPT) - 1


# ---------------------------------------------------------------------------- at the door


def door() -> Any:
    return front(FakePools(script=says(" there")))


async def test_prompt_logprobs_in_vllms_shape() -> None:
    prompt = TOKENIZER.encode("Hello")
    for entry, place in (
        (await door().complete("Hello", prompt_logprobs=2), "choice"),
        (await door().chat("Hello", prompt_logprobs=2), "body"),
    ):
        body = entry.json()
        where = body if place == "body" else body["choices"][0]
        none, *told = where["prompt_logprobs"]
        assert none is None and len(told) == body["usage"]["prompt_tokens"] - 1
        if place == "choice":
            own = told[0][str(prompt[1])]
            assert own == {"logprob": -1.5, "rank": 7, "decoded_token": own["decoded_token"]}
        assert all(2 <= len(token) <= 3 for token in told)
    silent = (await door().complete("Hello")).json()["choices"][0]
    assert "prompt_logprobs" not in silent
    refused = await door().complete("Hello", prompt_logprobs=2, stream=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_covers_prompt_and_answer(stream: bool) -> None:
    """FAULTS 5: nothing is null beyond position 0."""
    answer = await door().complete("Hello you", echo=True, logprobs=2, stream=stream)
    found = [c["choices"][0] for c in chunks(answer)] if stream else answer.json()["choices"]
    text = "".join(choice["text"] for choice in found)
    parts = [choice["logprobs"] for choice in found if choice["logprobs"]]
    joined = {name: [x for part in parts for x in part[name]] for name in parts[0]}
    assert text == "Hello you there"
    assert "".join(joined["tokens"]) == text
    assert joined["token_logprobs"][0] is None and joined["top_logprobs"][0] is None
    assert None not in joined["token_logprobs"][1:] + joined["top_logprobs"][1:]
    for token, offset in zip(joined["tokens"], joined["text_offset"], strict=True):
        assert text[offset:].startswith(token)


async def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    body = (await door().complete([5], prompt_logprobs=0)).json()
    assert body["choices"][0]["prompt_logprobs"] == [None]
