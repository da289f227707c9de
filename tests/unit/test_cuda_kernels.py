"""The Triton kernels in Triton's interpreter: indexing, masks and roundings, not races or speed.

The interpreter cuts bfloat16 off instead of rounding it and multiplies its bits as integers, so
matrix products are tested in the other types here and in bfloat16 only in tests/gpu.
"""

from typing import Any

import pytest
import torch

from tests.interpreted import only_interpreted
from tests.paged import Shape, paged_batch
from workers.layers import RMSNorm, Rotation

pytest.importorskip("triton", reason="triton is not installed")

from workers.cuda import kernels

pytestmark = only_interpreted
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 600]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for the last bits."""
    return torch.allclose(left.double(), right.double(), rtol=4 * torch.finfo(left.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100])
def test_norms_round_as_the_layer_does(dtype: torch.dtype, size: int) -> None:
    x, before = random(3, size, dtype=dtype), random(3, size, dtype=dtype, seed=1)
    layer = RMSNorm(1 + random(size, dtype=dtype, seed=2) / 10, 1e-5)
    assert close(kernels.norm(x, layer.weight, layer.eps), layer(x))
    residual = before.clone()
    normed = kernels.add_norm(x, residual, layer.weight, layer.eps)
    assert close(residual, before + x)
    assert close(normed, layer(before + x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * 100, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert close(kernels.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_rotate_and_store(normed: bool, head_dim: int) -> None:
    """Against the layers; rows without a slot are rotated and stored nowhere."""
    heads, kv_heads, page_size, rows = 4, 2, 8, 5
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim)
    angles = random(rows, head_dim // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    norms = [RMSNorm(1 + random(head_dim, seed=i) / 10, 1e-5) for i in (2, 3)]
    pool = torch.zeros(6, 3, kv_heads, 2, page_size, head_dim)
    keys, values = pool[:, 1, :, 0], pool[:, 1, :, 1]
    slots = torch.tensor([5 * 8 + 7, -1, 0, 2 * 8, -1])
    rotated = kernels.rotate_and_store(
        qkv,
        (norms[0].weight, norms[1].weight, 1e-5) if normed else None,
        (cos, sin),
        slots,
        keys,
        values,
    )
    q, k, v = qkv.view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = norms[0](q), norms[1](k)
    rotation = Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    torch.testing.assert_close(rotated, rotation.rotate(q))
    for row, page, offset in ((0, 5, 7), (2, 0, 0), (3, 2, 0)):
        torch.testing.assert_close(keys[page, :, offset], rotation.rotate(k)[row])
        assert torch.equal(values[page, :, offset], v[row])
        pool[page, 1, :, :, offset] = 0
    assert not pool.any()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (Shape(4, 2, 16, 16), torch.float32),
        (Shape(9, 3, 64, 16), torch.float16),
        (Shape(3, 3, 80, 12), torch.float32),
        (Shape(32, 1, 32, 256), torch.float16),
    ],
)
def test_decodes_equal_float64(shape: Shape, dtype: torch.dtype) -> None:
    """Page edges, any page size and group, one split and several, pages full of NaN around."""
    batch = paged_batch(shape, [(1, size) for size in SIZES], dtype)
    keys, values = batch.cache.keys[1], batch.cache.values[1]
    pages, offsets = batch.metadata.slots
    keys[pages, :, offsets], values[pages, :, offsets] = batch.k, batch.v
    out = attend(batch, 256)
    assert (out.double() - batch.reference()).norm() / batch.reference().norm() < (
        1e-5 if dtype == torch.float32 else 1e-2
    )


def attend(batch: Any, split: int) -> torch.Tensor:
    metadata, cache = batch.metadata, batch.cache
    return kernels.attend_decodes(
        batch.q,
        cache.keys[1],
        cache.values[1],
        metadata.seqused_k,
        metadata.page_table,
        split,
    )


def test_a_decode_does_not_depend_on_its_neighbours() -> None:
    batch = paged_batch(Shape(), [(1, 600), (1, 3), (1, 257)])
    pages, offsets = batch.metadata.slots
    batch.cache.keys[1][pages, :, offsets] = batch.k
    batch.cache.values[1][pages, :, offsets] = batch.v
    together = attend(batch, 256)
    for i, width in enumerate((38, 1, 17)):
        alone = kernels.attend_decodes(
            batch.q[i : i + 1],
            batch.cache.keys[1],
            batch.cache.values[1],
            batch.metadata.seqused_k[i : i + 1],
            batch.metadata.page_table[i : i + 1, :width],
            256,
        )
        assert torch.equal(alone[0], together[i])


def test_long_contexts_have_at_most_64_splits() -> None:
    assert kernels.split_tokens(1) == kernels.split_tokens(16384) == 256
    assert kernels.split_tokens(131072) == 2048
    split = kernels.split_tokens(100_001)
    assert split % kernels.KEYS_PER_TILE == 0 and 64 * split >= 100_001
