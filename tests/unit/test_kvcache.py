"""The pool is what kvtransfer expects of it, and layers see their part of it."""

import pytest
import torch

from kvtransfer.core.handle import KVLayout
from workers.kvcache import (
    KVCache,
    available_bytes,
    default_num_pages,
    make_cache,
    num_pages_for,
    pages_beside,
)
from workers.models.config import ModelError

LAYOUT = KVLayout("test", num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype="bfloat16")
CPU = torch.device("cpu")


def test_a_page_is_one_contiguous_record() -> None:
    cache = KVCache(LAYOUT, 5, CPU)
    assert cache.pool.is_contiguous()
    assert cache.pool[2].numel() * cache.pool.element_size() == LAYOUT.page_bytes
    assert cache.pool.shape == (5, 3, 2, 2, 4, 8)


def test_layer_views_share_the_pool() -> None:
    cache = KVCache(LAYOUT, 5, CPU)
    cache.keys[1][4, 0, 3] = 1
    cache.values[2][4, 1, 0] = 2
    assert cache.pool[4, 1, 0, 0, 3].eq(1).all() and cache.pool[4, 2, 1, 1, 0].eq(2).all()
    assert cache.pool.count_nonzero() == 16


def test_clear_zeroes_whole_pages_and_no_others() -> None:
    cache = KVCache(LAYOUT, 5, CPU)
    cache.pool.fill_(torch.nan)
    cache.clear(torch.tensor([1, 3]))
    clean = [not bool(page.isnan().any()) for page in cache.pool]
    assert clean == [False, True, False, True, False]


def test_sizes() -> None:
    assert num_pages_for(LAYOUT, 10 * LAYOUT.page_bytes + 1) == 10
    pages = default_num_pages(LAYOUT, max_model_len=10, device=CPU)
    assert pages == 8 * 3  # eight contexts of three pages: far less than the memory
    assert default_num_pages(LAYOUT, 1 << 50, CPU) * LAYOUT.page_bytes <= available_bytes()


def test_a_gpu_holds_pages_beside_its_largest_step() -> None:
    page = LAYOUT.page_bytes
    assert pages_beside(LAYOUT, free_bytes=1000 * page, step_bytes=0) == 900
    assert pages_beside(LAYOUT, free_bytes=1000 * page, step_bytes=500 * page) == 450
    assert pages_beside(LAYOUT, free_bytes=10 * page, step_bytes=500 * page) == 0


def test_no_room_is_said_in_one_line() -> None:
    with pytest.raises(ModelError, match="at least one KV page"):
        make_cache(LAYOUT, 0, CPU)
    with pytest.raises(ModelError, match=r"no memory for \d+ KV pages"):
        make_cache(LAYOUT, 1 << 40, CPU)
