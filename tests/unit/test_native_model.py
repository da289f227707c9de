"""A model on the native kernels is the same model, whatever its batch looks like."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tiny import tiny_model
from tests.greedy import generate, last_logits, sequence
from tests.native import KERNELS, same
from workers.batch import build
from workers.core.plan import Chunk
from workers.models.config import ModelError
from workers.models.llama import Llama
from workers.native.library import Kernels
from workers.native.model import NativeLlama
from workers.runner import ModelRunner, load_runner

ODD = {  # nothing a multiple of the vectors' length
    "hidden_size": 90,
    "intermediate_size": 106,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 18,
    "vocab_size": 1001,
    "attention_bias": True,
    "mlp_bias": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "tied": {"arch": "llama", "tie_word_embeddings": True},
    "odd": {"arch": "llama", **ODD},
    "qwen2": {"arch": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": {"arch": "qwen3", "head_dim": 80},
}
PROMPT = [(i * 37) % 1000 for i in range(300)]


def open_runner(folder: Path, dtype: str, isa: str) -> ModelRunner:
    runner = load_runner(folder, dtype, num_pages=80, isa=isa)
    assert isinstance(runner.model, Llama if isa == "torch" else NativeLlama)
    return runner


@KERNELS
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_torch(name: str, kernels: Kernels, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / name, **MODELS[name])
    lengths = [100, 1, 150, 49]
    want = last_logits(open_runner(folder, "float32", "torch"), PROMPT, lengths)
    got = last_logits(open_runner(folder, "float32", kernels.isa), PROMPT, lengths)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    narrow = last_logits(open_runner(folder, "bfloat16", kernels.isa), PROMPT, lengths)
    assert (narrow - want).norm() < 0.05 * want.norm()


@KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_chunks_or_threads(
    dtype: str, kernels: Kernels, t0_folder: Path
) -> None:
    """Bit for bit, in both precisions."""
    runner, threads = open_runner(t0_folder, dtype, kernels.isa), torch.get_num_threads()
    whole = last_logits(runner, PROMPT, [len(PROMPT)])
    try:
        for lengths in ([1] * 20 + [280], [299, 1], [7, 64, 200, 2, 27]):
            torch.set_num_threads(3 - torch.get_num_threads() % 2)
            same(last_logits(runner, PROMPT, lengths), whole)
    finally:
        torch.set_num_threads(threads)


@KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [[], [0], [4, 5, 299], [5, 17, 18, 305, 306], range(307)])
def test_rows_that_are_asked_for_are_those_of_the_whole(
    dtype: str, rows: list[int], kernels: Kernels, t0_folder: Path
) -> None:
    """The last layer leaves the others out, and their keys and values are there all the same."""
    lengths, caches, results = (5, 1, 300, 1), [], []
    for wanted in (None, torch.tensor(list(rows), dtype=torch.int64)):
        runner = open_runner(t0_folder, dtype, kernels.isa)
        chunks = [
            Chunk(sequence(str(i), PROMPT[:length], range(20 * i, 20 * i + 20)), 0, length)
            for i, length in enumerate(lengths)
        ]
        batch = build(tuple(chunks), runner.cache.layout.page_size, runner.model.device)
        plan = runner.attention.plan(batch.attention, runner.model.dtype)
        with torch.inference_mode():
            forward = runner.model.forward
            results.append(forward(batch.tokens, batch.positions, runner.cache, plan, wanted))
        caches.append(runner.cache.pool)
    same(results[1], results[0][list(rows)])
    same(caches[1], caches[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_neighbours(dtype: str, t0_folder: Path) -> None:
    runner = load_runner(t0_folder, dtype, num_pages=80)
    if not isinstance(runner.model, NativeLlama):
        pytest.skip("no native kernels here")
    prompts = [PROMPT[:n] for n in (3, 16, 50, 100, 7)]
    alone = [sequence(str(i), p, range(10), max_tokens=30) for i, p in enumerate(prompts)]
    for seq in alone:
        generate(runner, [seq])
    beside = [
        sequence(str(i), p, range(i * 10, i * 10 + 10), max_tokens=30)
        for i, p in enumerate(prompts)
    ]
    generate(runner, beside, budget=13)
    assert [seq.output for seq in beside] == [seq.output for seq in alone]


def test_what_the_kernels_cannot_do_runs_on_torch(t0_folder: Path, tmp_path: Path) -> None:
    assert isinstance(load_runner(t0_folder, "float16", num_pages=8).model, Llama)
    wide = tiny_model(tmp_path / "wide", num_attention_heads=1, num_key_value_heads=1, head_dim=320)
    assert isinstance(load_runner(wide, "float32", num_pages=8).model, Llama)


def test_an_unknown_instruction_set_is_named(t0_folder: Path) -> None:
    with pytest.raises(ModelError, match="'mmx' is none of torch, avx512_bf16"):
        load_runner(t0_folder, num_pages=8, isa="mmx")
