"""The GPU benchmark's arithmetic, and its loads on T0 without a GPU."""

from dataclasses import replace

import pytest

from bench import gpu
from bench.gpu import LLAMA_8B, Roofline, Row
from workers.models.llama import _names
from workers.runner import ModelRunner


def test_weights_are_counted_as_the_model_has_them() -> None:
    layers, head = gpu.num_weights(LLAMA_8B)
    assert layers + 2 * head == pytest.approx(8.03e9, rel=1e-3)  # with the embedding


def test_a_small_decode_is_bound_by_memory_and_a_prompt_by_arithmetic() -> None:
    h200 = Roofline(bytes_per_s=4e12, flops_per_s=800e12)
    assert h200.step_s(LLAMA_8B, 1, 1, 500) == pytest.approx(15.01e9 / 4e12, rel=0.01)
    assert h200.step_s(LLAMA_8B, 2048, 0, 0) == pytest.approx(2 * 6.98e9 * 2048 / 800e12, rel=0.05)
    contexts = [h200.step_s(LLAMA_8B, 64, 64, 64 * n) for n in (500, 4000)]
    assert contexts[1] - contexts[0] == pytest.approx(64 * 3500 * 131072 / 4e12, rel=0.01)


def test_loads_run_on_any_runner(t0: ModelRunner) -> None:
    assert gpu.fits(t0, 3, 300) and not gpu.fits(t0, 4, 300)
    assert 0 < gpu.decode_s(t0, 2, 40, steps=3) < 5
    assert 0 < gpu.prefill_s(t0, 50, 20, repeats=1) < 5


def test_the_table_gives_rates_and_shares() -> None:
    row = Row("decode 8 x 500", tokens=8, seconds=0.004, eager_s=0.009, roofline_s=0.003)
    text = gpu.table([row, replace(row, load="prefill 512")])
    assert text.splitlines()[2] == "| decode 8 x 500 | 4.00 | 9.00 | 2000 | 3.00 | 75% |"
    assert len(text.splitlines()) == 4


def test_random_weights_have_every_tensor() -> None:
    weights = gpu.RandomWeights(gpu.torch.device("cpu"))
    weights.require(_names(LLAMA_8B))
    assert weights.read("a", (3, 4)).shape == (3, 4) and weights.read("b", (3,)).eq(1).all()
