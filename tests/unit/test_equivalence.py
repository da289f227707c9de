"""T0: the tokens of a request do not depend on how it is served."""

import random

import pytest
import torch
import transformers

from bench.tiny import tiny_model
from tests.pair import Pair
from workers.core.policy import POLICIES, Limits
from workers.core.request import Request, Sampling
from workers.models.config import ModelConfig
from workers.models.llama import Llama
from workers.weights import Checkpoint

LENGTHS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 257]
NUM_TOKENS = 24


def prompt_of(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(3, 49152) for _ in range(length))


def greedy(length: int) -> Request:
    return Request(f"greedy-{length}", prompt_of(length), Sampling(NUM_TOKENS, temperature=0.0))


def seeded(name: str, length: int, seed: int = 42) -> Request:
    return Request(name, prompt_of(length), Sampling(16, temperature=0.8, top_p=0.95, seed=seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("t0"))


@pytest.fixture(scope="module")
def model(folder):
    config = ModelConfig.load(folder)
    return Llama(config, Checkpoint(folder), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def reference(folder):
    """What transformers generates, one prompt at a time."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = {}
    for length in LENGTHS:
        prompt = torch.tensor([prompt_of(length)])
        with torch.inference_mode():
            out = theirs.generate(
                prompt, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
        tokens[f"greedy-{length}"] = out[0, length:].tolist()
    return tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("budget", [7, 16, 17, 64, 4096])
def test_every_cell_gives_the_tokens_of_transformers(model, reference, budget, page_size, policy):
    """FAULTS 3, 43: budgets x page sizes x policies, mixed and disaggregated."""
    requests = [greedy(length) for length in LENGTHS]
    with Pair(model, Limits(budget, 16, policy), page_size=page_size) as pair:
        assert pair.generate(requests, disaggregated=False) == reference
        assert pair.generate(requests, disaggregated=True) == reference


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("disaggregated", [False, True])
def test_preempted_requests_give_the_same_tokens(model, reference, policy, disaggregated):
    requests = [greedy(length) for length in LENGTHS]
    with Pair(model, Limits(64, 16, policy), num_pages=19) as pair:
        assert pair.generate(requests, disaggregated=disaggregated) == reference
        assert pair.num_preemptions > 0


def test_a_seed_gives_the_same_tokens_everywhere(model):
    """FAULTS 7: alone, among unseeded requests, mixed, disaggregated, and preempted."""
    with Pair(model, Limits(64, 16)) as pair:
        alone = pair.generate([seeded("s", 40)], disaggregated=False)["s"]
        assert len(set(alone)) > 4
        for i in range(5):
            others = [seeded(f"other-{j}", 20 + j, seed=100 * i + j) for j in range(3)]
            for disaggregated in (False, True):
                batch = [*others, seeded("s", 40)]
                assert pair.generate(batch, disaggregated=disaggregated)["s"] == alone
    with Pair(model, Limits(64, 16), num_pages=8) as pair:
        batch = [*(seeded(f"other-{j}", 30, seed=j) for j in range(3)), seeded("s", 40)]
        assert pair.generate(batch, disaggregated=False)["s"] == alone
        assert pair.num_preemptions > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16, 17])
def test_exactly_max_tokens_in_both_modes(model, max_tokens):
    """FAULTS 19."""
    with Pair(model, Limits(64, 16)) as pair:
        for disaggregated in (False, True):
            request = Request("r", prompt_of(40), Sampling(max_tokens, temperature=0.0))
            tokens = pair.generate([request], disaggregated=disaggregated)["r"]
            assert len(tokens) == max_tokens


def test_tokens_are_the_same_with_the_prefix_cache_cold_warm_half_evicted_and_off(model):
    """Done 7 of the prefix cache: greedy, in both modes."""
    long, other = greedy(257), [greedy(129), greedy(65), greedy(64)]
    with Pair(model, Limits(64, 16), prefix_caching=False) as pair:
        off = pair.generate([long], disaggregated=False)[long.id]
        assert pair.cached_tokens == 0
    for disaggregated in (False, True):
        with Pair(model, Limits(64, 16), num_pages=21) as pair:
            cold = pair.generate([long], disaggregated=disaggregated)[long.id]
            warm = pair.generate([long], disaggregated=disaggregated)[long.id]
            hits = pair.cached_tokens
            assert hits >= 256
            for request in other:  # each takes pages of the long one's
                pair.generate([request], disaggregated=disaggregated)
            half = pair.generate([long], disaggregated=disaggregated)[long.id]
            assert hits < pair.cached_tokens < 2 * hits
        assert off == cold == warm == half


@pytest.mark.parametrize("num_pages", [512, 40])
def test_pages_fetched_while_they_are_computed_give_the_same_tokens(model, reference, num_pages):
    """FAULTS 53: nothing is decoded before its pages are here; with plenty of room and little."""
    requests = [greedy(length) for length in LENGTHS]
    with Pair(model, Limits(16, 16), num_pages=num_pages) as pair:
        for _ in range(3):
            assert pair.generate(requests, disaggregated=True, early=True) == reference
        assert pair.num_early > 0
