"""Steps of the real runner on T0: mixed batches, page tables and precision do not show."""

from pathlib import Path

import pytest
import torch

from bench.tiny import tiny_model
from tests.greedy import advance, generate, sequence
from workers.core.plan import Chunk
from workers.models.config import ModelError
from workers.runner import ModelRunner, load_runner, resolve_dtype


def prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(49152, (num_tokens,), generator=generator).tolist()


def test_neighbours_and_page_order_do_not_change_tokens(t0: ModelRunner) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()
    lengths = [3, 16, 50, 100, 7]
    alone = [sequence(str(n), prompt(n, n), range(10), max_tokens=20) for n in lengths]
    for seq in alone:
        generate(t0, [seq])
    together = [
        sequence(str(n), prompt(n, n), order[i * 10 : i * 10 + 10], max_tokens=20)
        for i, n in enumerate(lengths)
    ]
    generate(t0, together, budget=13)
    assert [seq.output for seq in together] == [seq.output for seq in alone]


@pytest.mark.parametrize("page_size", [8, 32])
def test_page_size_does_not_change_tokens(t0: ModelRunner, t0_folder: Path, page_size: int) -> None:
    runner = load_runner(t0_folder, "float32", page_size=page_size, num_pages=20)
    outputs = []
    for each in (t0, runner):
        seq = sequence("a", prompt(70, 1), range(15), max_tokens=20)
        generate(each, [seq], budget=17)
        outputs.append(seq.output)
    assert outputs[0] == outputs[1]


def test_rubbish_in_free_pages_does_no_harm(t0_folder: Path) -> None:
    """A sequence that produced NaN must not reach those who get its pages next."""
    runner = load_runner(t0_folder, "float32", num_pages=20)
    outputs = []
    for rubbish in (0.0, torch.nan):
        runner.cache.pool.fill_(rubbish)
        seqs = [
            sequence("a", prompt(20, 1), [3, 9, 4], max_tokens=20),
            sequence("b", prompt(90, 2), range(10, 18), max_tokens=20),
        ]
        generate(runner, seqs, budget=7)
        outputs.append([seq.output for seq in seqs])
    assert outputs[0] == outputs[1]


def test_recomputing_prompt_and_output_continues_the_same(t0: ModelRunner) -> None:
    """What preemption and a lost worker ask for: prefill the tokens so far, draw the next."""
    for temperature in (0.0, 1.0):
        settings = {"max_tokens": 20, "temperature": temperature, "seed": 11}
        whole = sequence("a", prompt(30, 3), range(8), **settings)
        generate(t0, [whole])
        resumed = sequence("a", prompt(30, 3), range(20, 28), **settings)
        resumed.output = whole.output[:9]
        generate(t0, [resumed], budget=16)
        assert resumed.output == whole.output


def test_only_chunks_that_reach_the_end_give_tokens(t0: ModelRunner) -> None:
    seq = sequence("a", prompt(20, 4), range(4))
    assert t0.run((Chunk(seq, 0, 19),)) == {}
    seq.num_computed = 19
    assert set(t0.run((Chunk(seq, 19, 1),))) == {"a"}


def test_seeded_tokens_among_others(t0: ModelRunner) -> None:
    """FAULTS 7 with the model: alone and with three neighbours, five times each."""
    outputs = []
    for i in range(10):
        seeded = sequence("a", prompt(10, 7), range(4), max_tokens=16, temperature=0.8, seed=42)
        others = [
            sequence(str(n), prompt(5 + n, n), range(4 * n + 4, 4 * n + 8), temperature=1.0, seed=n)
            for n in range(3 if i % 2 else 0)
        ]
        generate(t0, [seeded, *others])
        outputs.append(seeded.output)
    assert all(output == outputs[0] for output in outputs)


def test_penalties_are_the_same_in_chunks(t0: ModelRunner) -> None:
    """FAULTS 9: a prompt of repeated tokens, in chunks of 8 and in one."""
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        outputs = []
        for budget in (8, 4096):
            seq = sequence("a", [500, 501, 502, 500] * 10, range(6), max_tokens=24, **{name: 1.9})
            generate(t0, [seq], budget)
            t0.forget("a")
            outputs.append(seq.output)
        assert outputs[0] == outputs[1]


def test_bfloat16_runs_and_is_close(t0: ModelRunner, t0_folder: Path) -> None:
    runner = load_runner(t0_folder, "bfloat16", num_pages=20)
    assert runner.cache.layout.dtype == "bfloat16"
    assert runner.cache.pool.dtype == torch.bfloat16
    seq = sequence("a", prompt(20, 8), range(4), logprobs=0)
    wide = sequence("a", prompt(20, 8), range(4), logprobs=0)
    near, exact = runner.run((Chunk(seq, 0, 20),)), t0.run((Chunk(wide, 0, 20),))
    assert near["a"].logprob == pytest.approx(exact["a"].logprob, abs=0.2)


def test_a_step_after_a_hand_off_copies_only_pages(t0: ModelRunner) -> None:
    """Pages moved to other numbers hold all that a sequence needs to go on."""
    here = sequence("a", prompt(37, 9), [1, 2, 3], max_tokens=12)
    generate(t0, [here])
    source = sequence("a", prompt(37, 9), [1, 2, 3], max_tokens=12)
    advance(t0, [Chunk(source, 0, 37)])
    moved = sequence("a", prompt(37, 9), [30, 20, 25, 26], max_tokens=12)
    t0.cache.pool[[30, 20, 25]] = t0.cache.pool[[1, 2, 3]]
    moved.output, moved.num_computed = list(source.output), 37
    while len(moved.output) < 12:
        advance(t0, [Chunk(moved, moved.num_computed, 1)])
    assert moved.output == here.output


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dtype 'int3' is not supported"):
        resolve_dtype("int3", torch.device("cpu"))
    folder = tiny_model(tmp_path, vocab_size=64)
    with pytest.raises(ModelError, match="num_pages"):
        load_runner(folder, "float32", num_pages=-1)
    with pytest.raises(ModelError, match="page_size"):
        load_runner(folder, "float32", page_size=-16)
    with pytest.raises(ModelError, match="device"):
        load_runner(folder, "float32", device="toaster")
