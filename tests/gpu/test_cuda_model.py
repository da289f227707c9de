"""The same promises on a GPU: attention, and T0's tokens."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.greedy import generate, sequence
from tests.paged import Shape, paged_batch
from tests.tiny import tiny_model
from workers.attention import FlashAttention
from workers.batch import AttentionMetadata
from workers.kvcache import KVCache
from workers.runner import load_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_flash = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed"
)
SIZES = [(1, 300), (1, 20), (1, 256), (64, 512), (70, 70), (1, 33)]


@needs_flash
def test_flash_equals_float64() -> None:
    batch = paged_batch(Shape(8, 2, 64, 256), SIZES, torch.bfloat16)
    expected = batch.reference()
    device = torch.device("cuda")
    q, k, v = (x.to(device) for x in (batch.q, batch.k, batch.v))
    cache = KVCache(batch.cache.layout, batch.cache.num_pages, device)
    cache.pool.copy_(batch.cache.pool)
    metadata = AttentionMetadata(batch.metadata.spans, 256, device)
    plan = FlashAttention().plan(metadata, q.dtype)
    plan.store(k, v, cache, 1)
    out = plan.forward(q, cache, 1).cpu().double()
    assert (out - expected).norm() / expected.norm() < 1e-2


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


def test_default_dtype_and_pages(tmp_path: Path) -> None:
    runner = load_runner(tiny_model(tmp_path), device="cuda", num_pages=16)
    seq = sequence("a", range(50), range(8), max_tokens=8)
    generate(runner, [seq], budget=16)
    assert len(seq.output) == 8
