"""Attention backends give what float64 attention gives, on any mix of decodes and chunks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paged import PagedBatch, Shape, paged_batch
from workers.attention import AttentionBackend, FlashAttention, TorchAttention

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


class RecordingFlash:
    """flash_attn 2's two functions: checks what its documentation demands, computes in float64.

    Signatures as in flash_attn/flash_attn_interface.py of 2.8.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append("varlen")
        assert block_table is not None
        num_seqs = len(block_table)
        self._check(q, k, v, block_table, causal, num_seqs)
        for lengths in (cu_seqlens_q, cu_seqlens_k):
            assert lengths.dtype == torch.int32 and lengths.is_contiguous()
            assert len(lengths) == num_seqs + 1 and lengths[0] == 0
        assert cu_seqlens_q[-1] == len(q)
        q_lengths, k_lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert max_seqlen_q == max(q_lengths) and max_seqlen_k == max(k_lengths)
        parts = [
            self._one(rows, k, v, block_table[i], k_lengths[i])
            for i, rows in enumerate(q.split(q_lengths))
        ]
        return torch.cat(parts)

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: None = None,
        v: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        self.calls.append("kvcache")
        assert block_table is not None and cache_seqlens is not None
        self._check(q, k_cache, v_cache, block_table, causal, len(q))
        assert q.dim() == 4
        assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (len(q),)
        contexts = cache_seqlens.tolist()
        parts = [
            self._one(rows, k_cache, v_cache, block_table[i], contexts[i])
            for i, rows in enumerate(q)
        ]
        return torch.stack(parts)

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_table: torch.Tensor,
        causal: bool,
        num_seqs: int,
    ) -> None:
        assert causal and q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert k.shape == v.shape and k.dim() == 4
        num_pages, page_size, num_kv_heads, head_dim = k.shape
        assert page_size % 256 == 0 and head_dim <= 256 and head_dim % 8 == 0
        assert q.shape[-2] % num_kv_heads == 0 and q.shape[-1] == head_dim
        assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
        assert len(block_table) == num_seqs
        assert block_table.min() >= 0 and block_table.max() < num_pages

    @staticmethod
    def _one(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, context: int
    ) -> torch.Tensor:
        """Causal is aligned to the bottom right: the last row sees everything."""
        group = q.shape[-2] // k.shape[2]
        keys, values = (
            x[pages.long()].flatten(0, 1)[:context].double().repeat_interleave(group, dim=1)
            for x in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[-1] ** -0.5
        hidden = torch.ones(len(q), context, dtype=torch.bool).triu(context - len(q) + 1)
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", probs, values).to(q.dtype)


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        ([(1, 1), (1, 255), (1, 256), (1, 257), (1, 600)], ["kvcache"]),
        ([(40, 40), (256, 300), (2, 257)], ["varlen"]),
        ([(1, 300), (1, 20), (64, 512), (1, 70)], ["kvcache", "varlen"]),
    ],
)
def test_flash_calls_keep_the_librarys_contract(sizes: Any, calls: list[str]) -> None:
    flash = RecordingFlash()
    batch = paged_batch(Shape(page_size=256), sizes, torch.bfloat16)
    out = attend(FlashAttention(flash), batch)
    assert flash.calls == calls
    assert (out.double() - batch.reference()).norm() / batch.reference().norm() < 1e-2
