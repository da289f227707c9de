"""Every supported architecture computes what transformers computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tiny import tiny_model
from tests.greedy import Reference, generate, last_logits, sequence
from workers.runner import ModelRunner, load_runner

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "smollm": ("llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "yarn rope": ("qwen2", {"rope_scaling": YARN}),
    "transformers 5 rope": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 256}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def random_tokens(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    arch, overrides = CASES[name]
    folder = tiny_model(tmp_path, arch, vocab_size=512, **overrides)
    runner = load_runner(folder, "float32", num_pages=32)
    reference = Reference(folder)
    tokens = random_tokens(200, 512)
    difference = last_logits(runner, tokens, [70, 1, 129]) - reference.logits(tokens)[-1]
    assert difference.abs().max() < 1e-4
    seq = sequence("a", tokens[:100], range(16), max_tokens=24)
    generate(runner, [seq], budget=33)
    assert seq.output == reference.greedy(tokens[:100], 24)


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 257])
@pytest.mark.parametrize("budget", [7, 16, 17, 64, 4096])
def test_chunked_prefill_equals_one_pass(t0: ModelRunner, num_tokens: int, budget: int) -> None:
    """FAULTS 3."""
    tokens = random_tokens(num_tokens, t0.vocab_size, seed=num_tokens)
    lengths = [min(budget, num_tokens - start) for start in range(0, num_tokens, budget)]
    once = last_logits(t0, tokens, [num_tokens])
    assert (last_logits(t0, tokens, lengths) - once).abs().max() < 1e-3
    outputs = []
    for size in (budget, 4096):
        seq = sequence("a", tokens, range(30), max_tokens=32)
        generate(t0, [seq], size)
        outputs.append(seq.output)
    assert outputs[0] == outputs[1]


def test_tiny_outputs_depend_on_the_context(t0: ModelRunner) -> None:
    """T0 is worth comparing: no repetition, and one token changed far back changes the rest."""
    tokens = random_tokens(60, t0.vocab_size)
    seqs = [sequence("a", tokens, range(8), max_tokens=32)]
    seqs.append(sequence("b", [tokens[0] + 1, *tokens[1:]], range(8, 16), max_tokens=32))
    generate(t0, seqs)
    assert len(set(seqs[0].output)) > 16
    assert seqs[0].output != seqs[1].output
