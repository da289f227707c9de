"""Attention backends give what float64 attention gives, on any mix of decodes and chunks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paged import PagedBatch, Shape, paged_batch
from workers.attention import AttentionBackend, TorchAttention

LAYER = 1


def attend(backend: AttentionBackend, batch: PagedBatch) -> torch.Tensor:
    plan = backend.plan(batch.metadata, batch.q.dtype)
    plan.store(batch.k, batch.v, batch.cache, LAYER)
    return plan.forward(batch.q, batch.cache, LAYER)


sizes = st.integers(1, 400).flatmap(
    lambda context: st.tuples(st.one_of(st.just(1), st.integers(1, context)), st.just(context))
)


@given(
    decodes=st.lists(st.integers(1, 400).map(lambda n: (1, n)), max_size=5),
    chunks=st.lists(sizes, max_size=3),
    heads=st.sampled_from([(4, 2), (3, 3), (8, 1), (9, 3)]),
    page_size=st.sampled_from([8, 16, 32]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_torch_equals_float64(
    decodes: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    page_size: int,
    seed: int,
) -> None:
    if not decodes + chunks:
        return
    batch = paged_batch(Shape(*heads, page_size=page_size), decodes + chunks, seed=seed)
    out = attend(TorchAttention(), batch)
    assert (out.double() - batch.reference()).abs().max() < 1e-5


EDGES = [(1, 1), (1, 15), (1, 16), (1, 17), (16, 16), (17, 17), (16, 32), (15, 33), (1, 300)]


def test_page_edges() -> None:
    batch = paged_batch(Shape(), EDGES)
    out = attend(TorchAttention(), batch)
    assert (out.double() - batch.reference()).abs().max() < 1e-5


def test_bfloat16_is_within_its_rounding() -> None:
    batch = paged_batch(Shape(), EDGES, torch.bfloat16)
    error = (attend(TorchAttention(), batch).double() - batch.reference()).norm()
    assert error / batch.reference().norm() < 1e-2


def test_store_touches_only_the_slots_of_this_step() -> None:
    batch = paged_batch(Shape(), [(1, 20), (5, 40)])
    before = batch.cache.pool.clone()
    TorchAttention().plan(batch.metadata, batch.q.dtype).store(batch.k, batch.v, batch.cache, LAYER)
    changed = (before != batch.cache.pool) & ~(before.isnan() & batch.cache.pool.isnan())
    slots = changed.any(-1).any(3).any(2)[:, LAYER]  # [page, page_size]
    assert int(slots.sum()) == 6
    assert not changed[:, 0].any()
