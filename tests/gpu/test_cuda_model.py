"""The CUDA path on a GPU: attention, kernels, graphs and sampling against the host's."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tiny import tiny_model
from tests.greedy import advance, generate, sequence
from tests.paged import PagedBatch, Shape, paged_batch
from workers.batch import AttentionMetadata
from workers.core.plan import Chunk
from workers.core.request import Sequence
from workers.kvcache import KVCache
from workers.layers import RMSNorm
from workers.runner import ModelRunner, load_runner
from workers.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
LIBRARIES = [
    pytest.param(
        "flash-attn",
        marks=pytest.mark.skipif(not HAS_FLASH, reason="flash-attn is not installed"),
    ),
    "torch-varlen",
]
SIZES = [(1, 300), (1, 20), (1, 256), (1, 5000), (64, 512), (70, 70), (1, 33)]


def library(name: str) -> Any:
    from workers.cuda.attention import FlashAttn, TorchVarlen

    return FlashAttn() if name == "flash-attn" else TorchVarlen(8192)


def on_gpu(batch: PagedBatch) -> tuple[KVCache, list[torch.Tensor]]:
    cache = KVCache(batch.cache.layout, batch.cache.num_pages, CUDA)
    cache.pool.copy_(batch.cache.pool)
    return cache, [x.to(CUDA) for x in (batch.q, batch.k, batch.v)]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("shape", [(8, 2, 64), (32, 8, 128), (9, 3, 64), (8, 8, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_equals_float64(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    from workers.cuda.attention import CudaAttention

    batch = paged_batch(Shape(*shape, 256), SIZES, dtype)
    cache, (q, k, v) = on_gpu(batch)
    metadata = AttentionMetadata(batch.metadata.spans, 256, CUDA)
    plan = CudaAttention(library(name)).plan(metadata, dtype)
    plan.store(k, v, cache, 1)
    out = plan.forward(q, cache, 1).cpu().double()
    expected = batch.reference()
    assert (out - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_round_as_the_layers_do(dtype: torch.dtype) -> None:
    from workers.cuda import kernels

    torch.manual_seed(0)
    x, before = torch.randn(2, 300, 4096, device=CUDA).to(dtype).unbind(0)
    layer = RMSNorm(torch.rand(4096, device=CUDA).to(dtype) + 0.5, 1e-5)
    residual = before.clone()
    normed = kernels.add_norm(x, residual, layer.weight, layer.eps)
    assert torch.equal(residual, before + x)
    torch.testing.assert_close(normed, layer(before + x))
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(kernels.silu_mul(x), torch.nn.functional.silu(gate) * up)


def test_float32_tokens_equal_the_cpu(tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = tiny_model(tmp_path)
    outputs = []
    for device in ("cpu", "cuda"):
        runner = load_runner(folder, "float32", device, page_size=16, num_pages=64)
        seqs = [
            sequence(str(n), range(n, 2 * n), range(10 * i, 10 * i + 10), max_tokens=20)
            for i, n in enumerate((5, 40, 100))
        ]
        generate(runner, seqs, budget=17)
        outputs.append([seq.output for seq in seqs])
    assert outputs[0] == outputs[1]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """T0 with heads that the fast kernels take, in bfloat16."""
    folder = tiny_model(tmp_path_factory.mktemp("t0"), "qwen3", head_dim=64)
    return load_runner(folder, device="cuda", num_pages=64, max_seqs=16)


def test_the_fast_path_is_taken(fast: ModelRunner) -> None:
    from workers.cuda.runner import CudaRunner

    assert isinstance(fast, CudaRunner)
    assert fast.cache.layout.page_size == 256 and fast.cache.layout.dtype == "bfloat16"
    assert fast._graphs is not None, "the log says why steps are not recorded"


def prefilled(runner: ModelRunner, count: int) -> list[Sequence]:
    seqs = []
    for i in range(count):
        prompt = range(100 + i, 100 + i + 250 + i)
        seqs.append(sequence(str(i), prompt, [2 * i, 2 * i + 1], max_tokens=12))
        advance(runner, [Chunk(seqs[-1], 0, seqs[-1].num_tokens)])
    return seqs


@pytest.mark.parametrize("count", [1, 3, 8, 11, 16])
def test_a_replayed_step_equals_an_eager_one(fast: Any, count: int) -> None:
    """Logits of the same step, recorded and not: padding may change cuBLAS's choice, no more."""
    from workers.batch import build

    seqs = prefilled(fast, count)
    chunks = tuple(Chunk(seq, seq.num_computed, 1) for seq in seqs)
    batch = build(chunks, 256, torch.device("cpu"))
    with torch.inference_mode():
        fast.cache.clear(batch.fresh_pages.to(CUDA))
        replayed = fast._graphs.logits(batch).clone()
        eager = fast._eager(batch)
    assert (replayed - eager).norm() / eager.norm() < 2e-2
    assert (replayed.argmax(-1) == eager.argmax(-1)).float().mean() > 0.9


def test_bfloat16_is_close_to_the_cpu(fast: ModelRunner, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3", head_dim=64)
    host = load_runner(folder, "float32", "cpu", page_size=256, num_pages=64)
    results = []
    for runner in (fast, host):
        seq = sequence("a", range(300), range(2), logprobs=0)
        results.append(runner.run((Chunk(seq, 0, 300),))["a"].logprob)
    assert results[0] == pytest.approx(results[1], abs=0.2)


def test_generation_through_graphs_and_chunks(fast: ModelRunner) -> None:
    seqs = [
        sequence(str(i), range(50 + i, 90 + 3 * i), [i], max_tokens=20, temperature=i % 2, seed=i)
        for i in range(6)
    ]
    generate(fast, seqs, budget=64)
    assert all(len(seq.output) == 20 for seq in seqs)


def test_the_devices_sampler_chooses_as_the_hosts(fast: ModelRunner) -> None:
    from workers.cuda.sampler import DeviceSampler

    logits = torch.randn(64, 49152, generator=torch.Generator().manual_seed(0)) * 3
    seqs = [
        sequence(str(i), [1, 2], temperature=0.5 + i % 3 / 2, top_p=1 - i % 4 / 10, seed=i)
        for i in range(64)
    ]
    ours = DeviceSampler().sample(logits.to(CUDA), seqs)
    theirs = Sampler().sample(logits, seqs)
    assert sum(a.id == b.id for a, b in zip(ours, theirs, strict=True)) >= 63


@pytest.mark.parametrize("start", [0, 100])
def test_the_host_waits_once_in_a_step(fast: ModelRunner, start: int) -> None:
    """The second wait of a step is an error here: torch counts them all."""
    seqs = prefilled(fast, 3)
    chunks = [Chunk(seq, seq.num_computed, 1) for seq in seqs]
    if start:
        chunks.append(Chunk(sequence("late", range(400), [40, 41]), start, 50))
    assert waits(lambda: fast.run(tuple(chunks))) <= 1


def waits(action: Callable[[], object]) -> int:
    with pytest.warns(UserWarning) as caught:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
