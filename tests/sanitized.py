"""Runs the native kernels, compiled with the address sanitizer, over shapes with awkward ends.

Started by tests/unit/test_native_sanitized.py in a process that has the sanitizer preloaded.
"""

import sys
from pathlib import Path

import torch

from bench.tiny import tiny_model
from tests.greedy import generate, last_logits, sequence
from tests.paged import Shape, paged_batch
from tests.unit.test_native_model import MODELS, PROMPT
from workers.kvcache import DTYPES, KVCache
from workers.models.config import ModelConfig
from workers.native.attention import NativeAttention
from workers.native.library import Kernels, PackedLinear
from workers.native.model import NativeLlama
from workers.runner import ModelRunner
from workers.weights import Checkpoint

FLAGS = ["-fsanitize=address", "-O1", "-g"]
SHAPES = [((9, 3), 64, 16), ((4, 2), 16, 7), ((5, 1), 80, 1), ((6, 3), 40, 64)]
SIZES = [(1, 1), (1, 15), (1, 257), (17, 80), (3, 300), (130, 600), (64, 64)]


def attend(kernels: Kernels, dtype: torch.dtype) -> None:
    for heads, head_dim, page_size in SHAPES:
        batch = paged_batch(Shape(*heads, head_dim, page_size), SIZES, dtype)
        plan = NativeAttention(kernels).plan(batch.metadata, dtype)
        plan.store(batch.k, batch.v, batch.cache, 1)
        plan.forward(batch.q, batch.cache, 1)


def multiply(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, inputs, outputs in ((1, 2, 1), (7, 66, 35), (13, 130, 100), (97, 34, 65)):
        weight = torch.randn(2 * outputs, inputs).to(dtype)
        for gated in (False, True):
            packed = PackedLinear(kernels, weight, torch.randn(2 * outputs), gated)
            kernels.linear(torch.randn(rows, inputs).to(dtype), packed)


def step(kernels: Kernels, dtype: str, folder: Path) -> None:
    for name, fields in MODELS.items():
        model_folder = tiny_model(folder / dtype / name, **fields)
        config = ModelConfig.load(model_folder)
        model = NativeLlama(config, Checkpoint(model_folder), DTYPES[dtype], kernels)
        cache = KVCache(config.kv_layout(16, dtype), 40, torch.device("cpu"))
        runner = ModelRunner(model, cache, NativeAttention(kernels))
        last_logits(runner, PROMPT, [100, 1, 199])
        generate(runner, [sequence("a", PROMPT[:20], range(40), max_tokens=3)])


def main() -> None:
    kernels = Kernels(sys.argv[1], FLAGS)
    for name in ("float32", "bfloat16"):
        attend(kernels, DTYPES[name])
        multiply(kernels, DTYPES[name])
        step(kernels, name, Path(sys.argv[2]))
    print("clean")


if __name__ == "__main__":
    main()
