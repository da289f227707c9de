"""The native kernels give what float64 gives, for every instruction set that this machine has."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import KERNELS, same
from tests.paged import PagedBatch, Shape, paged_batch
from workers.layers import RMSNorm, Rotation
from workers.native.attention import NativeAttention
from workers.native.library import Kernels, PackedLinear

LAYER = 1
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # of the norm
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor | None = None) -> None:
    """``size``: of what was added up, where it may cancel out."""
    size = want if size is None else size
    assert (got.double() - want).norm() <= TOLERANCE[got.dtype] * size.norm()


def attend(kernels: Kernels, batch: PagedBatch) -> torch.Tensor:
    plan = NativeAttention(kernels).plan(batch.metadata, batch.q.dtype)
    plan.store(batch.k, batch.v, batch.cache, LAYER)
    poison_unused(batch)
    return plan.forward(batch.q, batch.cache, LAYER)


def poison_unused(batch: PagedBatch) -> None:
    """NaN wherever no sequence has a token, behind contexts in their last pages as well."""
    size = batch.metadata.page_size
    used = torch.zeros(batch.cache.num_pages, size, dtype=torch.bool)
    for span in batch.metadata.spans:
        for page, number in enumerate(span.pages):
            used[number, : span.context - page * size] = True
    batch.cache.pool.permute(0, 4, 1, 2, 3, 5)[~used] = torch.nan


contexts = st.one_of(st.integers(1, 70), st.integers(60, 70), st.integers(200, 600))
sizes = contexts.flatmap(
    lambda context: st.tuples(st.one_of(st.just(1), st.integers(1, context)), st.just(context))
)


@KERNELS
@dtypes
@given(
    sizes=st.lists(sizes, min_size=1, max_size=6),
    heads=st.sampled_from([(4, 2), (3, 3), (8, 1), (9, 3), (14, 2), (5, 1), (12, 1)]),
    head_dim=st.sampled_from([16, 18, 40, 64, 80, 96, 128, 256]),
    page_size=st.integers(1, 64),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_attention_equals_float64(
    kernels: Kernels,
    dtype: torch.dtype,
    sizes: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    seed: int,
) -> None:
    batch = paged_batch(Shape(*heads, head_dim, page_size), sizes, dtype, seed)
    check(attend(kernels, batch), batch.reference())


EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]


@KERNELS
@dtypes
def test_borders_of_tiles_segments_and_pages(kernels: Kernels, dtype: torch.dtype) -> None:
    sizes = [(length, n) for n in EDGES for length in (1, 2, n // 2, n) if 0 < length <= n]
    batch = paged_batch(Shape(4, 2, 64, 16), sizes, dtype)
    check(attend(kernels, batch), batch.reference())


@KERNELS
@pytest.mark.parametrize("heads", [(9, 3), (160, 20), (24, 24)], ids=str)
def test_heads_taken_together_give_what_each_gives_alone(
    kernels: Kernels, heads: tuple[int, int]
) -> None:
    """Many decodes take the heads of a page together, as many as there is room for; one alone, or
    a long chunk, takes them one by one."""
    many = [(1, 300), (1, 9), *((1, 64 * n) for n in range(1, 9)), (1, 700)]
    batch = paged_batch(Shape(*heads, 64, 16), many, torch.float32)
    got = attend(kernels, batch)
    check(got, batch.reference())
    alone = paged_batch(Shape(*heads, 64, 16), [(1, 300)], torch.float32)
    pages = batch.metadata.spans[0].pages
    alone.cache.pool[alone.metadata.spans[0].pages] = batch.cache.pool[pages]
    alone.k[:], alone.v[:], alone.q[:] = batch.k[:1], batch.v[:1], batch.q[:1]
    same(attend(kernels, alone), got[:1])


@KERNELS
@dtypes
def test_rows_do_not_depend_on_chunks_neighbours_or_threads(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    """Bit for bit: a decode, a short chunk and a long chunk take three different ways."""
    context, threads = 600, torch.get_num_threads()
    whole = paged_batch(Shape(6, 2, 64, 16), [(context, context)], dtype)
    expected = attend(kernels, whole)
    try:
        for length, others in ((1, []), (2, []), (3, [(1, 90)]), (40, [(7, 9)]), (300, [])):
            torch.set_num_threads(2 if others else 1)
            part = paged_batch(Shape(6, 2, 64, 16), [(length, context), *others], dtype)
            part.cache.pool[part.metadata.spans[0].pages] = whole.cache.pool[
                whole.metadata.spans[0].pages
            ]
            part.k[:length], part.v[:length] = whole.k[-length:], whole.v[-length:]
            part.q[:length] = whole.q[-length:]
            same(attend(kernels, part)[:length], expected[-length:])
    finally:
        torch.set_num_threads(threads)


@KERNELS
@dtypes
@given(
    rows=st.one_of(st.integers(1, 30), st.sampled_from([96, 97, 200])),
    inputs=st.integers(1, 100).map(lambda n: 2 * n),
    outputs=st.integers(1, 150),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_linear_equals_float64(
    kernels: Kernels,
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
    biased: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(2 * outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(2 * outputs, generator=generator).to(dtype) if biased else None
    parts = [x.double(), weight.double(), None if bias is None else bias.double()]
    want = F.linear(*parts)
    size = F.linear(*(None if part is None else part.abs() for part in parts))
    check(kernels.linear(x, PackedLinear(kernels, weight, bias)), want, size)
    gated, (gate, up) = PackedLinear(kernels, weight, bias, gated=True), want.chunk(2, dim=-1)
    gate_size, up_size = size.chunk(2, dim=-1)
    check(kernels.linear(x, gated), F.silu(gate) * up, gate_size * up_size)


@KERNELS
@dtypes
def test_a_row_times_weights_does_not_depend_on_the_rows_beside_it(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(200, 130).to(dtype), torch.randn(100, 130).to(dtype)
    packed = PackedLinear(kernels, weight)
    whole = kernels.linear(x, packed)
    for first, count in ((0, 1), (5, 13), (190, 10), (3, 120)):
        rows = slice(first, first + count)
        same(kernels.linear(x[rows], packed), whole[rows])


@KERNELS
@pytest.mark.parametrize("size", [16, 80, 576, 1000])
def test_norm_rounds_as_torch_does(kernels: Kernels, size: int) -> None:
    x, weight = torch.randn(9, size) * 3, torch.randn(size)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        want = RMSNorm(weight.to(dtype), 1e-5)(x.to(dtype))
        got = kernels.norm(x.to(dtype), weight.to(dtype), 1e-5)
        off = (got.float() - want.float()).abs() > tolerance * want.float().abs()
        assert off.float().mean() < 0.01, (
            "a scale that falls between two values may round the other way"
        )
        torch.testing.assert_close(
            got, want, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=0
        )


@KERNELS
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_store_equal_torch(kernels: Kernels, head_dim: int, normed: bool) -> None:
    shape = Shape(6, 2, head_dim, 7)
    batch = paged_batch(shape, [(1, 20), (30, 45), (5, 5)])
    before = batch.cache.pool.clone()
    qkv = torch.cat((batch.q, batch.k, batch.v), dim=1).contiguous()
    angles = torch.rand(len(qkv), head_dim // 2) * 9
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(
        torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
    )
    norms = [RMSNorm(torch.rand(head_dim), 1e-5) if normed else None for _ in range(2)]
    q, k = ((n(x) if n else x) for n, x in zip(norms, (batch.q, batch.k), strict=True))
    plan = NativeAttention(kernels).plan(batch.metadata, torch.float32)
    plan.store(rotation.rotate(k), batch.v, batch.cache, LAYER)
    expected, batch.cache.pool[:] = batch.cache.pool.clone(), before
    weights = [n.weight if n else None for n in norms]
    kernels.rotate_and_store(
        qkv, torch.cat((cos, sin), -1), batch.cache, LAYER, plan.batch, weights, 1e-5
    )
    torch.testing.assert_close(qkv[:, :6], rotation.rotate(q), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.cache.pool, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@KERNELS
@pytest.mark.parametrize("size", [1, 5, 1024, 1030, 49152])
def test_the_most_likely_token_is_the_first_of_the_largest(kernels: Kernels, size: int) -> None:
    logits = torch.randn(5, size)
    logits[1] = 2.0  # all equal
    logits[2, size // 2 :] = logits[2].max() + 1
    logits[3] = -torch.inf
    logits[4] = torch.nan
    want = [int((row == row.max()).nonzero()[0]) for row in logits[:4]]
    assert kernels.argmax(logits[:4]) == want
    assert 0 <= kernels.argmax(logits[4:])[0] < size, "a broken row ends nobody else's step"
